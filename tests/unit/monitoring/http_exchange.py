"""Exchange one request and its reply without a network, and provide a snapshot to ask about."""

import socket
import threading
from types import SimpleNamespace
from typing import Any, cast

from checkpointless.launcher.agent.watch import Watch
from checkpointless.observability.monitoring.http_status import _StatusHandler
from checkpointless.observability.monitoring.metrics import JobStatus, RankStatus, Snapshot

JOB = JobStatus(
    nodes=[{"node": 0, "state": "joined"}, {"node": 1, "state": "absent", "why": "it closed the connection"}],
    ranks=[{"rank": 0, "state": "leaving"}, {"rank": 1, "state": "gone"}],
    spares=1,
    incidents=4,
    cause="node",
    inexact=1,
)
SNAPSHOT = Snapshot(
    node=0,
    at_s=1.5,
    looked_at_s=100.0,
    generation=3,
    high_water=7,
    incident="4",
    ranks=(RankStatus(0, "leaving", 4242, 1, 7, 8, 0.25), RankStatus(2, "starting", None, 2, None, None, None)),
    job=JOB,
)


def pages_of(snapshot: Snapshot) -> Watch:
    watch = Watch(snapshot.node)
    watch.snapshot = snapshot
    return watch


def answer(head: bytes, watch: Watch) -> bytes:
    client, accepted = socket.socketpair()
    with client, accepted:
        client.settimeout(60)
        client.sendall(head)
        client.shutdown(socket.SHUT_WR)
        server = SimpleNamespace(watch=watch, turn=threading.Lock(), answers_to=bool)
        _StatusHandler(accepted, ("", 0), cast(Any, server))
        accepted.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


def get(watch: Watch, path: str) -> tuple[int, str]:
    head, _, body = answer(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode(), watch).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    return int(head.split()[1]), body.decode()
