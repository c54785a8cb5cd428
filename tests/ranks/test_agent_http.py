"""Test health, status and metrics of a real agent: in a run, through incidents, and under a flood."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from checkpointless.cli import main
from checkpointless.observability.monitoring.http_status import MAX_CONNECTIONS
from checkpointless.system.environment import TOKEN_ENV
from tests.ranks.agent_job import TOKEN, Coordinator, Job
from tests.ranks.test_agent_nodes import Nodes
from tests.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]


class Http:
    """Asks an agent or a coordinator for what it serves, where its standard error has said."""

    def __init__(self, said: Iterable[str]) -> None:
        where = (re.search(r"health and metrics at http://127\.0\.0\.1:(\d+) ", line) for line in said)
        found = next(filter(None, where))
        self.port = int(found[1])

    @classmethod
    def of(cls, job: Job) -> Http:
        return cls(iter(job.process.stderr.readline, ""))

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def status(self) -> dict[str, Any]:
        code, body = self.get("/status")
        assert code == 200
        return json.loads(body)

    def until(self, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Wait for a status of which ``holds`` is true, and return it."""
        found: list[dict[str, Any]] = []

        def looked() -> object:
            found.append(self.status())
            return holds(found[-1])

        wait_until(looked)
        return found[-1]

    def metric(self, name: str, **labels: str) -> float | None:
        """Return the value of a metric; the labels that all of them have are left out."""
        families = list(text_string_to_metric_families(self.get("/metrics")[1]))
        assert len({family.name for family in families}) == len(families) >= 6
        name = f"checkpointless_{name}"
        for sample in (sample for family in families for sample in family.samples):
            own = {label: value for label, value in sample.labels.items() if label not in ("job", "run", "node")}
            if (sample.name, own) == (name, labels):
                return sample.value
        return None

    def is_closed(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) != 0


def test_a_run_an_incident_and_the_end(tmp_path: Path) -> None:
    """Rank 1 is killed while rank 2 sleeps, which comes back only as a new process; then rank 0 sleeps."""
    faults = ("2:4:0:sleep", "1:6:0:SIGKILL", "0:7:0:wait", "0:9:1:sleep")
    job = Job(tmp_path, "steps.py", *faults, http_port=0, regroup_timeout_s=3.0, heartbeat_timeout_s=6.0)
    http = Http.of(job)
    assert http.get("/healthz")[0] in (200, 503)  # it may not have joined its own job yet

    during = http.until(lambda now: now["incident"])
    assert http.get("/healthz") == (200, "ok, recovering from incident 1\n")
    assert http.metric("incident_in_progress") == 1
    assert (during["node"], during["generation"], during["exit_code"]) == (0, 0, None)
    assert (during["job"]["incidents"], during["job"]["cause"]) == (1, "SIGKILL")
    asleep = during["ranks"][2]
    assert (asleep["state"], asleep["committed"], asleep["making"], asleep["incarnation"]) == ("leaving", 3, 4, 0)
    assert asleep["beat_age_s"] > 0

    wait_until(lambda: any(note["generation"] == 1 for note in job.notes("fault", 0)))
    after = http.until(lambda now: now["ranks"][1]["state"] == now["ranks"][2]["state"] == "done")
    assert http.get("/healthz") == (200, "ok\n")
    assert (after["generation"], after["high_water"], after["incident"]) == (1, 10, None)
    assert [rank["incarnation"] for rank in after["ranks"]] == [0, 1, 1]
    pids = {note["rank"]: note["pid"] for note in job.notes("go")}
    assert {rank["rank"]: rank["pid"] for rank in after["ranks"]} == pids
    assert (after["ranks"][0]["committed"], after["ranks"][0]["making"]) == (8, 9)
    assert (http.metric("recovery_seconds_sum", rung="process") or 0) > 2
    assert after["job"]["nodes"] == [{"node": 0, "state": "joined", "why": ""}]
    assert len(after["job"]["ranks"]) == 3

    assert http.metric("generation") == 1
    assert http.metric("incidents_total", cause="SIGKILL") == 1
    assert http.metric("incidents_total", cause="hang") == 0
    assert http.metric("respawns_total") == 2
    assert http.metric("recovery_seconds_count", rung="process") == 1
    assert http.metric("recovery_seconds_count", rung="in-process") == 0
    assert http.metric("recovery_seconds_bucket", rung="process", le="2.0") == 0
    assert http.metric("steps_lost_total") == http.metric("faults_injected_total", kind="sigkill") == 0
    assert http.metric("committed_step", rank="0") == 8
    assert (http.metric("ranks", state="running"), http.metric("ranks", state="done")) == (1, 2)
    whose = r'{job="steps",node="0",run="[^"]+",'
    about = r'run_dir="[^"]+",script="[^"]+steps.py",version="[^"]+"} 1.0'
    assert re.search(f"^checkpointless_info{whose}{about}$", http.get("/metrics")[1], re.MULTILINE)
    assert http.metric("inexact_incidents_total") == 0
    wait_until(lambda: (http.metric("wall_seconds", cause="SIGKILL") or 0) > 2)

    job.end()
    assert http.is_closed()


def test_only_the_coordinators_node_tells_of_the_whole_job(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, "3:4:0:sleep", http_port=0, heartbeat_timeout_s=5.0)
    first, second = map(Http.of, nodes.agents)
    wait_until(lambda: nodes.notes("fault", 3))
    here = first.until(lambda now: now["generation"] == 0)
    there = second.until(lambda now: now["generation"] == 0 and now["ranks"][1]["making"] == 4)
    assert [rank["rank"] for rank in here["ranks"]] == [0, 1]
    assert [node["state"] for node in here["job"]["nodes"]] == ["joined", "joined"]
    assert [(rank["rank"], rank["node"]) for rank in here["job"]["ranks"]] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert (there["node"], [rank["rank"] for rank in there["ranks"]], there["job"]) == (1, [2, 3], None)
    assert second.get("/healthz") == (200, "ok\n")
    assert (second.metric("generation"), second.metric("incidents_total", cause="hang")) == (0, None)
    assert (first.metric("stage_seconds_count", stage="init"), second.metric("transfer_bytes_total")) == (0, 0)
    nodes.end()
    assert first.is_closed()
    assert second.is_closed()


class WatchedNodes(Nodes):
    """Runs a job of several nodes whose coordinator, in a process of its own, serves what it knows."""

    def coordinate(self, *options: str) -> Coordinator:
        made = super().coordinate("--http-port", "0")
        self.http = Http(made.said)
        return made


def test_a_coordinator_in_a_process_of_its_own_tells_of_the_job(tmp_path: Path) -> None:
    """It does so without a run directory, too."""
    nodes = WatchedNodes(tmp_path, 2, "3:4:0:SIGKILL", "0:5:0:wait", "0:9:1:sleep", outside=True)
    during = nodes.http.until(lambda now: now["job"] and now["job"]["nodes"][1]["state"] == "joined")
    assert (during["node"], during["ranks"], during["exit_code"]) == (-1, [], None)
    wait_until(lambda: nodes.notes("fault", 0))
    wait_until(lambda: nodes.http.metric("recovery_seconds_count", rung="process") == 1)
    after = nodes.http.until(lambda now: now["generation"] == 1 and now["high_water"] >= 4)
    assert after["job"]["incidents"] == 1
    assert nodes.http.get("/healthz") == (200, "ok\n")
    assert nodes.http.metric("incidents_total", cause="SIGKILL") == 1
    assert nodes.http.metric("job_nodes", state="joined") == 2
    assert nodes.http.metric("respawns_total") is None  # each node tells of its own
    nodes.coordinator.process.terminate()
    nodes.end(code=1)
    nodes.coordinator.end(code=1)
    assert nodes.http.is_closed()


def test_two_hundred_slow_and_strange_connections_change_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, "steps.py", "2:7:0:sleep", http_port=0, heartbeat_timeout_s=5.0)
    http = Http.of(job)
    wait_until(lambda: job.notes("fault", 2))
    agent = psutil.Process(job.process.pid)
    before = agent.num_fds()
    crowd = [socket.create_connection(("127.0.0.1", http.port), timeout=60) for _ in range(200)]
    most = 0
    until_s = time.monotonic() + 2
    while time.monotonic() < until_s:
        for number, client in enumerate(crowd):
            try:
                if number % 4 == 1:
                    client.send(os.urandom(512))
                elif number % 4 == 2:
                    client.send(b"GET /healthz HTTP/1.1\r\nHost: here\r\nX: " + b"y" * 9000)
                elif number % 4 == 3:
                    client.send(b"G")
            except OSError:
                continue
        code, words = http.get("/healthz")
        assert (code, words[:2]) == (200, "ok")  # on a busy machine rank 2 is found to hang meanwhile
        most = max(most, agent.num_fds() - before)
    assert 0 < most <= MAX_CONNECTIONS + 1
    ended = job.end()
    assert ended.err.count("; recovering") == 1  # nothing but the hang caused one
    assert "rank 2 made no progress for 5 s at step 7" in ended.err
    for client in crowd:
        with client:
            try:
                assert client.recv(1) in (b"", b"H")
            except ConnectionError:
                continue
    assert http.is_closed()


def test_a_port_that_is_taken_ends_it_before_it_begins(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = Job(tmp_path, "steps.py", http_port=port).end(code=1)
    assert f"cannot serve http://127.0.0.1:{port}: Address already in use; choose another --http-port" in ended.err
    assert "Traceback" not in ended.err
    assert list(tmp_path.glob("notes-*")) == []


def test_a_coordinators_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_ENV, TOKEN)
        port = str(taken.getsockname()[1])
        words = ["coordinator", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:1", "--http-port", port]
        assert main(words) == 2
    assert f"error: cannot serve http://127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
