"""Whether ranks can meet: names are known, a port can be bound and reached, and the coordinator's host answers."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from checkpointless.doctor.findings import Family, Finding, Severity
from checkpointless.wire.address import LOOPBACK, resolve

_CONNECT_S = 3.0
_ECHO = b"checkpointless"


@dataclass(frozen=True)
class Endpoint:
    """What is known of the coordinator's endpoint.

    Attributes:
        text: the endpoint as given.
        name_error: why its host's name cannot be looked up ("" if it can).
        connect_error: why no connection was made ("" if one was).
        is_refused: whether the host answered that nothing listens there.
    """

    text: str
    name_error: str = ""
    connect_error: str = ""
    is_refused: bool = False


@dataclass(frozen=True)
class Network:
    """What is known of this node's network.

    Attributes:
        host: name of this machine.
        host_error: why that name gives no address of this machine ("" if it does).
        address: address that ranks use.
        address_error: why no port of it can be bound and reached ("" if one can).
        endpoint: the coordinator's endpoint; None: it was not given.
    """

    host: str
    host_error: str
    address: str
    address_error: str
    endpoint: Endpoint | None = None


def judge(network: Network, nodes: int) -> list[Finding]:
    """Return whether ranks can meet.

    Args:
        network: what is known of the network.
        nodes: number of nodes of the job.
    """
    findings = []
    if network.address_error:
        seen = f"no port of {network.address} can be bound and reached: {network.address_error}"
        todo = "allow connections of this node to itself"
        findings.append(_finding(Severity.ERROR, seen, "a connection to itself", todo))
    else:
        seen = f"ports of {network.address} can be bound and reached"
        findings.append(_finding(Severity.OK, seen, "a connection to itself"))
    if network.host_error:
        seen = f"the name {network.host} of this machine gives no address of it: {network.host_error}"
        todo = "enter it into DNS or /etc/hosts, or set GLOO_SOCKET_IFNAME: gloo listens there"
        severity = Severity.WARNING if nodes > 1 else Severity.ADVICE
        findings.append(_finding(severity, seen, "getaddrinfo", todo))
    if network.endpoint is not None:
        findings.append(_of_endpoint(network.endpoint))
    elif nodes > 1:
        seen = "the coordinator's endpoint is not known, so no connection to it was tried"
        findings.append(_finding(Severity.ADVICE, seen, "--rdzv-endpoint", "give --rdzv-endpoint H[:P]"))
    return findings


def read(endpoint: tuple[str, int] | None, nodes: int) -> Network:
    """Read names, bind and connect.

    Args:
        endpoint: host and port of the coordinator; None: not known.
        nodes: number of nodes of the job; the ranks of one node meet on the loopback interface.
    """
    host = socket.gethostname()
    met = None if endpoint is None else _endpoint(*endpoint)
    address = LOOPBACK
    if nodes > 1 and endpoint is not None and met is not None and not met.name_error:
        address = _own_address(*endpoint)
    return Network(host, _tried_host(host), address, _tried_address(address), met)


def _of_endpoint(endpoint: Endpoint) -> Finding:
    source = "--rdzv-endpoint"
    if endpoint.name_error:
        seen = f"the host of {endpoint.text} cannot be looked up: {endpoint.name_error}"
        return _finding(Severity.ERROR, seen, source, "give a name or address of node 0 that this node knows")
    if endpoint.is_refused:
        seen = f"the host of {endpoint.text} answers, and nothing listens there yet"
        return _finding(Severity.OK, seen, source)
    if endpoint.connect_error:
        seen = f"{endpoint.text} is not reached: {endpoint.connect_error}"
        todo = "open the port in the firewall between the nodes, and look whether node 0 is up"
        return _finding(Severity.ERROR, seen, source, todo)
    return _finding(Severity.OK, f"{endpoint.text} is reached", source)


def _endpoint(host: str, port: int) -> Endpoint:
    text = f"{host}:{port}"
    try:
        resolve(host)
    except OSError as error:
        return Endpoint(text, name_error=_words(error))
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except ConnectionRefusedError as error:
        return Endpoint(text, connect_error=_words(error), is_refused=True)
    except OSError as error:
        return Endpoint(text, connect_error=_words(error) or f"no answer within {_CONNECT_S:g} s")
    return Endpoint(text)


def _own_address(host: str, port: int) -> str:
    """Return the address from which this machine reaches another one; no packet is sent for that."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        try:
            probe.connect(where)
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def _tried_address(address: str) -> str:
    try:
        with socket.create_server((address, 0), family=_family(address)) as listener:
            listener.settimeout(_CONNECT_S)
            with socket.create_connection(listener.getsockname()[:2], timeout=_CONNECT_S) as ours:
                theirs, _ = listener.accept()
                with theirs:
                    theirs.settimeout(_CONNECT_S)
                    ours.sendall(_ECHO)
                    return "" if theirs.recv(len(_ECHO)) else "the connection was closed"
    except OSError as error:
        return _words(error)


def _tried_host(host: str) -> str:
    try:
        address = resolve(host)
        with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return _words(error)
    return ""


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _finding(severity: Severity, seen: str, source: str, todo: str = "") -> Finding:
    return Finding(Family.NETWORK, severity, seen, source, todo)
