"""Exchange one request and its reply without a network, and provide a snapshot to ask about."""

import socket
from types import SimpleNamespace
from typing import Any, cast

from checkpointless.launcher.agent.watch import Watch
from checkpointless.observability.monitoring.durations import Durations
from checkpointless.observability.monitoring.http_status import Pages, StatusHandler
from checkpointless.observability.monitoring.snapshot import (
    RECOVERY_BUCKETS_S,
    JobNode,
    JobRank,
    JobStatus,
    RankStatus,
    Snapshot,
)

NONE = Durations.none(RECOVERY_BUCKETS_S)
RUNGS = {"in-process": NONE.and_one_of(0.75), "process": NONE.and_one_of(40.0), "node": NONE, "job": NONE}
JOB = JobStatus(
    nodes=(JobNode(0, "joined", ""), JobNode(1, "absent", "it closed the connection")),
    ranks=(JobRank(0, 0, "leaving", 1), JobRank(1, 1, "gone", 0)),
    spares=1,
    incidents=4,
    cause="node",
    causes={"SIGKILL": 2, "SIGSEGV": 1},
    recoveries=NONE.and_one_of(0.75).and_one_of(40.0),
    rungs=RUNGS,
    steps_lost=3,
    given_up=1,
)
SNAPSHOT = Snapshot(
    node=0,
    at_s=1.5,
    looked_at_s=100.0,
    generation=3,
    high_water=7,
    incident="4",
    respawns=1,
    device_checks_failed=1,
    ranks=(RankStatus(0, "leaving", 4242, 1, 7, 8, 0.25), RankStatus(2, "starting", None, 2, None, None, None)),
    job=JOB,
)


def pages_of(snapshot: Snapshot) -> Pages:
    watch = Watch(snapshot.node)
    watch.snapshot = snapshot
    return Pages(watch)


def answer(head: bytes, pages: Pages) -> bytes:
    """Send a whole request and return the reply."""
    client, accepted = socket.socketpair()
    with client, accepted:
        client.settimeout(20)
        client.sendall(head)
        client.shutdown(socket.SHUT_WR)
        StatusHandler(accepted, ("", 0), cast(Any, SimpleNamespace(page_at=pages.at, answers_to=bool)))
        accepted.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


def get(pages: Pages, path: str) -> tuple[int, str]:
    """Return the status and the body."""
    head, _, body = answer(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode(), pages).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    return int(head.split()[1]), body.decode()
