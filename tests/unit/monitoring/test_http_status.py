"""Health, status and metrics: what is said of a snapshot, and how the server takes what it is sent."""

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless import monitoring
from checkpointless.agent.watch import Watch
from checkpointless.monitoring import http_status
from checkpointless.monitoring.durations import Durations
from checkpointless.monitoring.http_status import MAX_CONNECTIONS, MAX_REQUEST_BYTES, HttpStatus, Pages, answer
from checkpointless.monitoring.measured import MEASURED_STAGES, STAGE_BUCKETS_S, Measured
from checkpointless.monitoring.snapshot import (
    OUTSIDE,
    RECOVERY_BUCKETS_S,
    STALE_S,
    JobNode,
    JobRank,
    JobStatus,
    RankStatus,
    Snapshot,
    Tally,
)
from checkpointless.wire.node_messages import End

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
)
SNAPSHOT = Snapshot(
    node=0,
    at_s=1.5,
    looked_at_s=100.0,
    generation=3,
    high_water=7,
    incident="4",
    respawns=1,
    ranks=(RankStatus(0, "leaving", 4242, 1, 7, 8, 0.25), RankStatus(2, "starting", None, 2, None, None, None)),
    job=JOB,
)


def pages_of(snapshot: Snapshot) -> Pages:
    watch = Watch(snapshot.node)
    watch.snapshot = snapshot
    return Pages(watch)


def get(pages: Pages, path: str) -> tuple[int, str]:
    """Status and body."""
    head, _, body = answer(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode(), pages).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    return int(head.split()[1]), body.decode()


@pytest.mark.parametrize(
    ("snapshot", "now_s", "well", "words"),
    [
        (Snapshot(0), 1.0, False, "the agent has not joined the job yet"),
        (Snapshot(0, looked_at_s=1.0), 1.0, True, "ok, waiting for all ranks"),
        (Snapshot(0, looked_at_s=1.0, generation=0), 1.0 + STALE_S, True, "ok"),
        (Snapshot(0, looked_at_s=1.0, generation=0), 8.25, False, "the loop has not turned for 7.2 s"),
        (SNAPSHOT, 100.0, True, "ok, recovering from incident 4"),
        (Snapshot(0, looked_at_s=1.0, generation=0, exit_code=1), 1.0, False, "the job is over with exit code 1"),
    ],
)
def test_health(snapshot: Snapshot, now_s: float, well: bool, words: str) -> None:
    assert snapshot.health(now_s) == (well, words)


def test_a_sick_job_is_503_in_one_line() -> None:
    assert get(pages_of(Snapshot(0)), "/healthz") == (503, "the agent has not joined the job yet\n")
    well = Snapshot(0, looked_at_s=time.monotonic(), generation=0)
    assert get(pages_of(well), "/healthz?from=probe") == (200, "ok\n")


def test_the_status_is_the_snapshot() -> None:
    status, body = get(pages_of(SNAPSHOT), "/status")
    found = json.loads(body)
    assert status == 200
    assert {key: found[key] for key in ("node", "generation", "high_water", "incident", "respawns")} == {
        "node": 0,
        "generation": 3,
        "high_water": 7,
        "incident": "4",
        "respawns": 1,
    }
    assert found["ranks"][0] == {
        "rank": 0,
        "state": "leaving",
        "pid": 4242,
        "incarnation": 1,
        "committed": 7,
        "making": 8,
        "beat_age_s": 0.25,
    }
    assert found["job"]["incidents"] == 4
    assert found["job"]["nodes"][1] == {"node": 1, "state": "absent", "why": "it closed the connection"}
    assert found["job"]["recoveries"] == {"count": 2, "seconds": 40.75}
    assert found["job"]["rungs"]["process"] == {"count": 1, "seconds": 40.0}
    assert found["job"]["steps_lost"] == 3


def samples(text: str) -> dict[tuple[str, str], float]:
    """Every sample by its name and its label's value, as Prometheus's own parser reads them."""
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        (sample.name.removeprefix("checkpointless_"), *sample.labels.values(), "")[:2]: sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_metrics_are_those_of_the_snapshot() -> None:
    status, body = get(pages_of(SNAPSHOT), "/metrics")
    found = samples(body)
    assert status == 200
    assert found["generation", ""] == 3
    assert found["high_water_step", ""] == 7
    assert found["incident_in_progress", ""] == 1
    assert (found["ranks", "leaving"], found["ranks", "starting"], found["ranks", "running"]) == (1, 1, 0)
    assert found["committed_step", "0"] == 7
    assert ("committed_step", "2") not in found
    assert found["beat_age_seconds", "0"] == 0.25
    assert found["respawns_total", ""] == 1
    causes = {label: value for (name, label), value in found.items() if name == "incidents_total"}
    zeros = dict.fromkeys(("exception", "exit", "hang", "node", "replace"), 0)
    assert causes == {"SIGKILL": 2, "SIGSEGV": 1, **zeros}
    counts = {rung: found["recovery_seconds_count", rung] for rung in RUNGS}
    assert counts == {"in-process": 1, "process": 1, "node": 0, "job": 0}
    assert found["recovery_seconds_sum", "process"] == 40
    buckets = re.findall(r'recovery_seconds_bucket{le="([^"]+)",rung="process"} (\S+)', body)
    assert buckets == [
        ("0.5", "0.0"),
        ("1.0", "0.0"),
        ("2.0", "0.0"),
        ("5.0", "0.0"),
        ("10.0", "0.0"),
        ("30.0", "0.0"),
    ] + [(bound, "1.0") for bound in ("60.0", "120.0", "300.0", "600.0", "+Inf")]
    assert found["steps_lost_total", ""] == 3
    assert found["job_nodes", "absent"] == found["job_nodes", "joined"] == found["job_spares", ""] == 1
    assert found["job_ranks", "gone"] == 1


def test_what_is_not_known_has_no_sample() -> None:
    found = samples(get(pages_of(Snapshot(1)), "/metrics")[1])
    names = {name for name, _ in found}
    assert names == {"incident_in_progress", "ranks", "respawns_total"}
    assert json.loads(get(pages_of(Snapshot(1)), "/status")[1])["job"] is None


def test_what_ranks_measured_has_every_stage_and_kind_from_the_start() -> None:
    metrics = pytest.importorskip("checkpointless.monitoring.prometheus")
    stages = dict.fromkeys(MEASURED_STAGES, Durations.none(STAGE_BUCKETS_S))
    stages["abort"] = stages["abort"].and_one_of(0.25)
    found = samples(metrics.render(SNAPSHOT, Measured(stages, 4096, {"sigkill": 0, "hang": 2})).decode())
    assert {label for name, label in found if name == "stage_seconds_count"} == set(MEASURED_STAGES)
    assert (found["stage_seconds_count", "abort"], found["stage_seconds_sum", "abort"]) == (1, 0.25)
    assert found["stage_seconds_count", "verify"] == 0
    assert found["transfer_bytes_total", ""] == 4096
    assert (found["faults_injected_total", "sigkill"], found["faults_injected_total", "hang"]) == (0, 2)


def test_a_coordinator_in_a_process_of_its_own_tells_of_the_job_alone() -> None:
    watch = Watch(OUTSIDE)
    watch.log(None).emit("detect", "point", generation=0, incident="1", how="hang")
    job: dict[str, Any] = {"nodes": [], "ranks": [], "spares": []}
    known = {"generation": 2, "high_water": 7, "outcome": None, **job}
    watch.look_from_outside(cast(Any, SimpleNamespace(**known)), time.monotonic())
    pages = Pages(watch)
    assert get(pages, "/healthz") == (200, "ok, recovering from incident 1\n")
    found = samples(get(pages, "/metrics")[1])
    assert (found["generation", ""], found["high_water_step", ""]) == (2, 7)
    assert found["job_nodes", "absent"] == found["incidents_total", "hang"] == 0
    assert not {name for name, _ in found} & {"ranks", "respawns_total", "stage_seconds_count"}


def test_without_the_library_everything_else_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "prometheus_client"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "checkpointless.monitoring.prometheus", raising=False)
    monkeypatch.delattr(monitoring, "prometheus", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    pages = pages_of(SNAPSHOT)
    status, body = get(pages, "/metrics")
    assert (status, body) == (501, "/metrics needs prometheus_client: pip install 'checkpointless[metrics]'\n")
    assert get(pages, "/status")[0] == 200
    said: list[str] = []
    watch = Watch(0)
    with HttpStatus("127.0.0.1", 0, watch) as http:
        http.open(said.append)
    assert "pip install" in said[1]


def test_an_incident_is_counted_when_the_ranks_are_together_again_and_by_its_last_cause() -> None:
    tally = Tally()
    tally.event("go", "point", None, {})
    tally.event("detect", "point", "1", {"how": "exception"})
    tally.event("detect", "point", "1", {"how": "SIGKILL"})
    tally.event("respawn", "begin", "1", {})
    assert (tally.incidents, tally.open, dict(tally.causes)) == (1, {"1": "SIGKILL"}, {})
    tally.event("respawn", "end", "1", {})
    tally.event("go", "point", "1", {})
    tally.event("recovered", "point", "1", {"seconds": 0.07, "rung": "process", "steps_lost": 2})
    tally.event("detect", "point", "2", {"how": "hang"})
    assert (tally.incidents, tally.open, dict(tally.causes)) == (2, {"2": "hang"}, {"SIGKILL": 1})
    assert (tally.respawns, tally.recoveries.counts[-1], tally.recoveries.seconds) == (1, 1, 0.07)
    assert {rung: found.counts[-1] for rung, found in tally.rungs.items() if found.counts[-1]} == {"process": 1}
    assert tally.steps_lost == 2


def test_the_snapshot_is_replaced_a_few_times_per_second() -> None:
    watch = Watch(0)
    knows = {"index": 0, "ranks": {}, "generation": -1, "began_after": -1, "incident": None, "outcome": None}
    knows["clock"] = time.monotonic
    node = cast(Any, SimpleNamespace(**knows))
    found: list[Snapshot] = []
    for turn in range(1000):
        watch.look(node, None, 10.0 + turn / 1000)
        if watch.snapshot not in found:
            found.append(watch.snapshot)
    assert 2 <= len(found) <= 4
    kept = watch.snapshot
    assert (kept.generation, kept.high_water, kept.ranks) == (None, None, ())
    node.outcome = End(1, [])
    watch.look(node, None, 20.0)
    assert (kept.exit_code, watch.snapshot.exit_code) == (None, 1)


# ---- requests


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /status HTTP/1.0", 200),
        ("HEAD /status HTTP/1.1", 200),
        ("POST /status HTTP/1.1", 405),
        ("DELETE / HTTP/1.1", 405),
        ("GET / HTTP/1.1", 404),
        ("GET /status/ HTTP/1.1", 404),
        ("GET /../../etc/passwd HTTP/1.1", 404),
        ("GET /..%2f..%2fetc/passwd HTTP/1.1", 404),
        ("GET http://elsewhere/status HTTP/1.1", 404),
        ("CONNECT elsewhere:443 HTTP/1.1", 405),
        ("GET /status HTTP/9.9", 505),
        ("GET /status HTTP/x", 400),
        ("SSH-2.0-OpenSSH_9.6", 400),
        ("", 400),
    ],
)
def test_requests(request_line: str, status: int) -> None:
    reply = answer(f"{request_line}\r\nHost: here\r\n\r\n".encode(), pages_of(SNAPSHOT))
    if not request_line:
        assert reply == b""
        return
    assert reply.startswith(f"HTTP/1.0 {status} ".encode())
    assert b"etc" not in reply
    assert reply.endswith(b"\r\n\r\n") == request_line.startswith("HEAD")


@pytest.mark.parametrize("head", [b"GET /status HTTP/1.1\r\n" + b"a:\r\n" * 1000, b"x" * (MAX_REQUEST_BYTES + 1)])
def test_what_is_too_large_is_refused(head: bytes) -> None:
    assert answer(head, pages_of(SNAPSHOT)).startswith(b"HTTP/1.0 431 ")


@given(st.binary(max_size=300), st.sampled_from([b"", b"GET ", b"GET /status ", b"HEAD / HTTP/1.1\r\n"]))
def test_no_request_is_too_strange(garbage: bytes, begin: bytes) -> None:
    reply = answer(begin + garbage + b"\r\n\r\n", pages_of(SNAPSHOT))
    assert reply == b"" or reply.startswith(b"HTTP/1.0 ") or b"high_water" in reply


# ---- the server


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """A server, of which nothing may be left afterwards."""
    threads, descriptors = threading.active_count(), psutil.Process().num_fds()
    watch, said = Watch(0), list[str]()
    with HttpStatus("127.0.0.1", 0, watch) as http:
        http.open(said.append)
        watch.snapshot = SNAPSHOT
        port = int(said[0].split("127.0.0.1:")[1].split()[0])
        yield "127.0.0.1", port
    assert threading.active_count() == threads
    assert psutil.Process().num_fds() == descriptors
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def ask(where: tuple[str, int], path: str = "/status") -> bytes:
    with socket.create_connection(where, timeout=10) as client:
        client.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_who_is_slow_keeps_nobody_waiting_and_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_status, "REQUEST_TIMEOUT_S", 1.0)
    with serving() as where:
        slow = [socket.create_connection(where, timeout=10) for _ in range(3 * MAX_CONNECTIONS)]
        for client in slow[::2]:
            client.sendall(b"GET /st")
        assert b"high_water" in ask(where)
        assert b"high_water" in ask(where, "/status?" + "x" * (MAX_REQUEST_BYTES - 100))
        for client in slow:
            with client:
                try:
                    assert client.recv(100) == b""
                except ConnectionResetError:
                    continue


def test_a_request_may_come_byte_by_byte() -> None:
    with serving() as where, socket.create_connection(where, timeout=10) as client:
        for byte in b"GET /healthz HTTP/1.0\r\n\r\n":
            client.sendall(bytes([byte]))
            time.sleep(0.001)
        assert client.recv(100).startswith(b"HTTP/1.0 503 ")


def test_who_asks_and_does_not_listen_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_status, "REQUEST_TIMEOUT_S", 0.5)
    ranks = tuple(JobRank(rank, 0, "running", 0) for rank in range(200_000))
    large = Snapshot(0, job=JobStatus((), ranks, 0, 0, None, {}, NONE, {}))
    watch, said = Watch(0), list[str]()
    watch.snapshot = large
    with HttpStatus("127.0.0.1", 0, watch) as http:
        http.open(said.append)
        where = ("127.0.0.1", int(said[0].split("127.0.0.1:")[1].split()[0]))
        with socket.create_connection(where, timeout=60) as deaf:
            deaf.sendall(b"GET /status HTTP/1.0\r\n\r\n")
            time.sleep(1.5)
            assert len(b"".join(received(deaf))) < 10_000_000
        watch.snapshot = SNAPSHOT
        assert b"high_water" in ask(where)


def received(client: socket.socket) -> Iterator[bytes]:
    try:
        yield from iter(lambda: client.recv(1 << 20), b"")
    except ConnectionResetError:
        return


@pytest.mark.parametrize("host", ["not-a-host.invalid", "a..b", "203.0.113.7"])
def test_an_address_that_cannot_be_bound_to_is_named(host: str) -> None:
    with HttpStatus(host, 0, Watch(0)) as http, pytest.raises(OSError, match=f"serve http://{host}:0: .*--http"):
        http.open(lambda _: None)
