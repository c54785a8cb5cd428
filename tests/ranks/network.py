"""Provide hosts on one machine with a network between them: namespaces of the kernel, joined by a bridge.

This needs the right to make namespaces (root, or a container with CAP_NET_ADMIN and CAP_SYS_ADMIN).
:func:`is_possible` tells whether a process has it.
"""

import ctypes
import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNET = 0x40000000
INTERFACE = "eth0"


def is_possible() -> bool:
    """Return whether this process may make network namespaces, and the tools for it are here."""
    name = f"cp-probe-{uuid.uuid4().hex[:6]}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    except OSError:
        return False
    if made.returncode != 0:
        return False
    linked = subprocess.run(
        ["ip", "-n", name, "link", "add", "br0", "type", "bridge"], capture_output=True, check=False
    )
    subprocess.run(["ip", "netns", "del", name], check=True)
    return linked.returncode == 0


class Network:
    """Provides some hosts, each with an address of its own that the others reach."""

    def __init__(self, hosts: int) -> None:
        self._id = uuid.uuid4().hex[:6]
        self._hosts = hosts
        self._hub = f"cp-{self._id}-hub"
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "br0", "up")
        for host in range(hosts):
            name, port = self.name(host), self._port(host)
            _ip("netns", "add", name)
            peer = ["peer", "name", INTERFACE, "netns", name]
            _ip("-n", self._hub, "link", "add", port, "type", "veth", *peer)
            _ip("-n", self._hub, "link", "set", port, "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            for interface in (INTERFACE, "lo"):
                _ip("-n", name, "link", "set", interface, "up")

    def name(self, host: int) -> str:
        return f"cp-{self._id}-{host}"

    def address(self, host: int) -> str:
        return f"10.213.0.{host + 1}"

    def cut_off(self, host: int) -> None:
        """Pull the cable of a host: nothing gets through, and no connection is closed."""
        _ip("-n", self._hub, "link", "set", self._port(host), "down")

    def reconnect(self, host: int) -> None:
        _ip("-n", self._hub, "link", "set", self._port(host), "up")

    def close(self) -> None:
        for name in (*map(self.name, range(self._hosts)), self._hub):
            _ip("netns", "del", name)

    def _port(self, host: int) -> str:
        return f"port{host}"


@contextmanager
def network(hosts: int) -> Iterator[Network]:
    made = Network(hosts)
    try:
        yield made
    finally:
        made.close()


def enter(name: str) -> None:
    """Move this thread, and what it starts, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(Path("/run/netns") / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    finally:
        os.close(fd)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
