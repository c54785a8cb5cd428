"""Test what health, status and metrics say of a snapshot."""

import json
import re
import socket
import threading
import time
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from checkpointless.launcher.agent.watch import Watch
from checkpointless.observability.monitoring.http_status import _StatusHandler
from checkpointless.observability.monitoring.metrics import OUTSIDE, STALE_S, JobStatus, RankStatus, Snapshot
from checkpointless.observability.telemetry.event_names import EventName

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


def test_the_status_is_the_snapshot() -> None:
    status, body = get(pages_of(SNAPSHOT), "/status")
    found = json.loads(body)
    assert status == 200
    assert [found[key] for key in ("node", "generation", "high_water", "incident")] == [0, 3, 7, "4"]
    assert (found["ranks"], found["job"]) == ([vars(each) for each in SNAPSHOT.ranks], vars(SNAPSHOT.job))


def samples(text: str) -> dict[tuple[str, str], float]:
    """Return every sample by its name and its label's value, as Prometheus's own parser reads them."""
    return {
        (
            sample.name.removeprefix("checkpointless_"),
            next((value for name, value in sample.labels.items() if name not in ("job", "run", "node")), ""),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.name != "checkpointless_info"
    }


def test_the_metrics_are_those_of_the_snapshot() -> None:
    watch = pages_of(SNAPSHOT)
    log = watch.log(None)
    recoveries = [("SIGKILL", "process", 40.0), ("SIGSEGV", "in-process", 0.75)]
    for incident, (how, rung, seconds) in enumerate(recoveries):
        for each in ("exception", how):
            log.emit(EventName.DETECT, "point", generation=incident, incident=str(incident), how=each)
        log.emit(EventName.GO, "point", generation=incident + 1, incident=str(incident))
        more: dict[str, Any] = {"seconds": seconds, "rung": rung, "steps_lost": 3 * incident}
        log.emit(EventName.RECOVERED, "point", generation=incident + 1, incident=str(incident), **more)
    for edge in ("begin", "end"):
        log.emit(EventName.RESPAWN, edge, generation=0, incident="0", rank=1)
    for why in ("", "the device check exited with 1"):
        log.emit(EventName.DEVICE_CHECK, "point", generation=1, why=why)
    for remedy in ("try", "give_up"):
        log.emit(EventName.BAD_DEVICE, "point", generation=1, remedy=remedy)
    status, body = get(watch, "/metrics")
    found = samples(body)
    assert (status, found["generation", ""], found["high_water_step", ""]) == (200, 3, 7)
    assert (found["ranks", "leaving"], found["ranks", "starting"], found["ranks", "running"]) == (1, 1, 0)
    assert (found["committed_step", "0"], found["incident_in_progress", ""]) == (7, 1)
    assert ("committed_step", "2") not in found
    assert (found["beat_age_seconds", "0"], found["respawns_total", ""]) == (0.25, 1)
    causes = {label: value for (name, label), value in found.items() if name == "incidents_total"}
    zeros = dict.fromkeys(("exception", "exit", "hang", "node", "replace"), 0)
    assert causes == {"SIGKILL": 1, "SIGSEGV": 1, **zeros}
    counts = {rung: found["recovery_seconds_count", rung] for rung in ("in-process", "process", "node", "job")}
    assert counts == {"in-process": 1, "process": 1, "node": 0, "job": 0}
    assert found["recovery_seconds_sum", "process"] == 40
    buckets = re.findall(r'recovery_seconds_bucket{le="([^"]+)",node="0",rung="process"} (\S+)', body)
    below = [bound for bound, count in buckets if count == "0.0"]
    assert below == ["0.5", "1.0", "2.0", "5.0", "10.0", "30.0"]
    assert [bound for bound, count in buckets if count == "1.0"] == ["60.0", "120.0", "300.0", "600.0", "+Inf"]
    assert (found["steps_lost_total", ""], found["nodes_given_up_total", ""]) == (3, 1)
    assert found["device_checks_failed_total", ""] == found["job_spares", ""] == found["job_ranks", "gone"] == 1
    assert found["job_nodes", "absent"] == found["job_nodes", "joined"] == 1


def test_what_is_not_known_has_no_sample() -> None:
    found = samples(get(pages_of(Snapshot(1)), "/metrics")[1])
    names = {name for name, _ in found}
    assert names == {"incident_in_progress", "ranks", "respawns_total", "device_checks_failed_total"}
    assert json.loads(get(pages_of(Snapshot(1)), "/status")[1])["job"] is None


def a_coordinator() -> Any:
    job = SimpleNamespace(generation=2, high_water=7, outcome=None, incidents=SimpleNamespace(inexact=2))
    return SimpleNamespace(nodes=[], ranks=[], spares=[], job=job)


def test_a_coordinator_in_a_process_of_its_own_tells_of_the_job_alone() -> None:
    watch = Watch(OUTSIDE)
    watch.log(None).emit(EventName.DETECT, "point", generation=0, incident="1", how="hang")
    watch.look(None, a_coordinator(), time.monotonic())
    assert get(watch, "/healthz") == (200, "ok, recovering from incident 1\n")
    found = samples(get(watch, "/metrics")[1])
    assert (found["generation", ""], found["high_water_step", ""]) == (2, 7)
    assert found["job_nodes", "absent"] == found["incidents_total", "hang"] == 0
    assert not {name for name, _ in found} & {"ranks", "respawns_total", "stage_seconds_count"}


def test_every_sample_says_whose_it_is() -> None:
    run_dir = "/data/runs/20260101T120000Z-train"
    watch = Watch(0, "train", run_dir, "train.py")
    watch.snapshot = SNAPSHOT
    body = get(watch, "/metrics")[1]
    families = list(text_string_to_metric_families(body))
    whose = {"job": "train", "run": "20260101T120000Z-train", "node": "0"}
    labels = [sample.labels for family in families for sample in family.samples]
    assert labels
    assert all(whose.items() <= each.items() for each in labels)
    (info,) = (family for family in families if family.name == "checkpointless_info")
    about = {"version": version("checkpointless"), "script": "train.py", "run_dir": run_dir}
    assert [(sample.labels, sample.value) for sample in info.samples] == [({**whose, **about}, 1)]
    spare = samples(get(pages_of(replace(SNAPSHOT, node=OUTSIDE)), "/metrics")[1])
    assert spare["generation", ""] == 3


def test_the_status_names_the_cause_of_the_incident_in_progress() -> None:
    watch = Watch(OUTSIDE)
    log = watch.log(None)
    log.emit(EventName.GO, "point", generation=0)
    for how in ("exception", "SIGKILL"):
        log.emit(EventName.DETECT, "point", generation=0, incident="1", how=how)
    log.emit(EventName.GO, "point", generation=1, incident="1")
    log.emit(EventName.DETECT, "point", generation=1, incident="2", how="hang")
    watch.look(None, a_coordinator(), time.monotonic() + 1e6)
    found = json.loads(get(watch, "/status")[1])["job"]
    assert (found["incidents"], found["cause"]) == (2, "hang")
    assert samples(get(watch, "/metrics")[1])["incidents_total", "SIGKILL"] == 1
