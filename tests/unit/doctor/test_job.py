"""Test what is said of all nodes of a job, and how each node's findings come into the run directory."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from checkpointless.doctor import clock
from checkpointless.doctor.clock import Clock, judge_apart, judge_step
from checkpointless.doctor.findings import Family, Finding, Severity
from checkpointless.doctor.job import merged
from checkpointless.doctor.node import Question, examine, quick
from checkpointless.doctor.recorder import recording
from checkpointless.doctor.records import NodeRecord, Records, read, write

FINE = Finding(Family.KERNEL, Severity.OK, "memfd works")
FULL = Finding(Family.STORAGE, Severity.WARNING, "the disk is full", "disk", "free some space")
HERE = Clock("tsc", True, "boot-1", 1000.0, 0.001)


def record(node: int, *findings: Finding, clock: Clock = HERE, nodes: int = 2, **facts: str) -> NodeRecord:
    return NodeRecord(node, nodes, 0, f"host{node}", 1.8e9, clock, facts, (FINE, *findings))


def job(*records: NodeRecord) -> list[Finding]:
    return merged(Records({each.node: each for each in records}))


def changes(found: list[Finding]) -> list[Finding]:
    return [each for each in found if each.severity is not Severity.OK]


def test_nodes_that_agree_give_nothing_to_change() -> None:
    found = job(record(0, torch="2.7", NCCL="2.26.2"), record(1, torch="2.7", NCCL="2.26.2"))
    assert changes(found) == []
    assert replace(FINE, nodes=(0, 1)) in found


def test_one_finding_of_several_nodes_is_said_once() -> None:
    (found,) = changes(job(record(0, FULL, nodes=3), record(1, nodes=3), record(2, FULL, nodes=3)))
    assert found == replace(FULL, nodes=(0, 2))


def test_a_node_that_left_nothing_is_named() -> None:
    (found,) = changes(job(record(0, nodes=4), record(2, nodes=4)))
    assert (found.severity, found.nodes) == (Severity.WARNING, (1, 3))
    assert found.seen == "2 nodes left findings; nodes 1, 3 did not"
    assert "shared --run-dir" in found.todo


@pytest.mark.parametrize(
    ("name", "severity"),
    [
        *(("NCCL", Severity.WARNING), ("NVIDIA driver", Severity.WARNING)),
        *(("NCCL_NVLS_ENABLE", Severity.WARNING), ("NCCL_SOCKET_IFNAME", Severity.ADVICE)),
    ],
)
def test_differences_are_findings(name: str, severity: Severity) -> None:
    records = [replace(record(node, nodes=3), facts={name: "a" if node else "b"}) for node in range(3)]
    (found,) = changes(job(*records))
    assert (found.severity, found.seen) == (severity, f"{name} differs: a on nodes 1-2; b on node 0")
    (unset,) = changes(job(replace(record(0), facts={name: "x"}), record(1)))
    assert unset.seen == f"{name} differs: x on node 0; not set on node 1"


def test_clocks_that_differ_are_a_warning() -> None:
    ahead = replace(HERE, before_storage_s=7.501)
    (found,) = changes(job(record(0), record(1, clock=ahead)))
    assert found.severity is Severity.WARNING
    assert found.seen == "the clock of node 1 is 7.50 s ahead of that of node 0"
    (close,) = judge_apart({0: HERE, 1: replace(HERE, before_storage_s=0.3)})
    assert close.severity is Severity.OK
    assert judge_apart({0: HERE, 1: replace(HERE, before_storage_s=None)}) == []


@pytest.mark.parametrize(("moved_s", "words"), [(0.5, ""), (60.0, "set by 60.0 s forward"), (-5.0, "5.00 s back")])
def test_a_clock_that_was_set_is_a_warning(moved_s: float, words: str) -> None:
    later = replace(HERE, stands_s=HERE.stands_s + moved_s)
    assert [words in each.seen for each in judge_step(HERE, later)] == [True] * bool(words)
    assert judge_step(HERE, replace(later, boot="boot-2")) == []


def test_only_this_machines_clock_is_compared_with_now() -> None:
    later = replace(HERE, stands_s=HERE.stands_s + 60)
    found = merged(Records({0: record(0), 1: record(1)}), later, "host1")
    (step,) = changes(found)
    assert step.nodes == (1,)


def test_the_clock_of_this_machine(tmp_path: Path) -> None:
    seen = clock.read(tmp_path)
    assert seen.before_storage_s is not None
    assert abs(seen.before_storage_s) < 1.0
    assert abs(seen.stands_s - (time.time() - time.monotonic())) < 1.0
    assert judge_step(seen, clock.read()) == []
    assert [each.severity for each in clock.judge(replace(seen, is_synchronised=False), 1)] == [Severity.OK]
    assert [each.severity for each in clock.judge(replace(seen, is_synchronised=False), 2)] == [Severity.ADVICE]
    assert [each.severity for each in clock.judge(Clock("hpet"), 1)] == [Severity.ADVICE]


def test_a_clock_ahead_of_the_file_system_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    monkeypatch.setattr(clock.time, "time", lambda: now() + 30.0)
    ahead = clock.read(tmp_path).before_storage_s
    assert ahead is not None
    assert 29.0 < ahead < 35.0


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    one = record(1, FULL, torch="2.7")
    assert write(one, tmp_path) == tmp_path / "doctor" / "node-1.json"
    write(one, tmp_path)  # an agent in place of a lost one
    assert read(tmp_path) == Records({1: one})
    assert [path.name for path in (tmp_path / "doctor").iterdir()] == ["node-1.json"]
    assert read(tmp_path / "nothing") == Records({})


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", '{"node": "x"}', "\x00" * 100),
        json.dumps({"node": 0, "findings": [{"family": "storage", "severity": "terrible", "seen": "x"}]}),
    ],
)
def test_a_record_that_cannot_be_read_is_a_finding(text: str, tmp_path: Path) -> None:
    write(record(1), tmp_path)
    (tmp_path / "doctor" / "node-0.json").write_text(text)
    found = read(tmp_path)
    assert list(found.records) == [1]
    assert [each.severity for each in found.unreadable] == [Severity.WARNING]
    assert "node-0.json cannot be read" in found.unreadable[0].seen
    assert {each.severity for each in changes(merged(found))} == {Severity.WARNING}


def test_a_record_of_another_format_or_node_is_not_taken(tmp_path: Path) -> None:
    write(replace(record(0), format=9), tmp_path)
    write(record(1), tmp_path).rename(tmp_path / "doctor" / "node-2.json")
    first, second = read(tmp_path).unreadable
    assert "it has format 9, not 1" in first.seen
    assert "it is of node 1" in second.seen


@pytest.mark.slow
def test_a_job_leaves_the_findings_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    question = Question(ranks=2, nodes=2, run_dir=tmp_path, endpoint=("127.0.0.1", 1))
    with recording(question, node=1, spares=0):
        deadline_s = time.monotonic() + 120.0
        while not read(tmp_path).records and time.monotonic() < deadline_s:
            time.sleep(0.1)
    (found,) = read(tmp_path).records.values()
    assert (found.node, found.nodes, found.host) == (1, 2, socket.gethostname())
    assert abs(found.at_s - time.time()) < 300
    assert found.facts["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert found.clock.boot
    assert any("TORCH_NCCL_ASYNC_ERROR_HANDLING=3" in each.seen for each in found.findings)
    assert not [path for path in tmp_path.iterdir() if path.name != "doctor"]


def test_a_recording_ends_with_the_job_and_fails_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question = Question(run_dir=tmp_path)
    with recording(question, node=0, spares=0):
        pass
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with recording(question, node=0, spares=0):
        pass


def test_before_a_run_only_what_is_to_change_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quick(Question(), {}) == []
    assert quick(Question(), {"NCCL_NVLS_ENABLE": "1"}) == []  # there is no GPU here
    (missing,) = quick(Question(), {"TMPDIR": "/nowhere"})
    assert (missing.severity, missing.source) == (Severity.WARNING, "TMPDIR")
    monkeypatch.setattr("checkpointless.doctor.versions.has_driver", lambda: True)
    (harmful,) = [each for each in quick(Question(), {"NCCL_NVLS_ENABLE": "1"}) if each.family is Family.VARIABLES]
    assert harmful.severity is Severity.WARNING
    assert not [each for each in quick(Question(cpu=True), {"NCCL_NVLS_ENABLE": "1"}) if each.todo]


def test_before_a_run_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs() -> list[Finding]:
        time.sleep(5.0)
        return [FULL]

    monkeypatch.setattr("checkpointless.doctor.storage.shared_memory", hangs)
    began_s = time.monotonic()
    assert quick(Question(), {}) == []
    assert time.monotonic() - began_s < 2.0


def test_a_look_that_fails_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("nvidia-smi is odd")

    monkeypatch.setattr("checkpointless.doctor.devices.read", fails)

    question = Question(ask_torch=False, run_dir=tmp_path)
    found = examine(question, lambda line: None, {})
    failed = [each for each in found.findings if each.is_to_change]
    assert [each.seen for each in failed] == ["the check failed: RuntimeError: nvidia-smi is odd"]
    families = {each.family for each in found.findings}
    assert families == set(Family) - {Family.MEMORY, Family.NODES}
