"""Test what is kept of torch's flight recorder."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpointless.environment import FLIGHT_RECORDS_ENV, RUN_DIR_ENV, TORCH_FR_BUFFER_SIZE_ENV
from checkpointless.inprocess.communicators import flight_recorder
from checkpointless.inprocess.communicators.flight_recorder import FLIGHT_DIR, keep_records
from checkpointless.telemetry.scribe import scribe


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path))
    monkeypatch.setenv(FLIGHT_RECORDS_ENV, "active")
    return tmp_path


@pytest.fixture
def group() -> Iterator[None]:
    """Provide a group of one rank that has done two collectives."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(2):
        dist.all_reduce(torch.ones(3))
    yield
    dist.destroy_process_group()


def kept(run_dir: Path) -> dict[str, bytes]:
    assert scribe.flush(60)
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("group")
def test_the_state_of_the_groups_is_kept_and_what_is_not_complete(run_dir: Path) -> None:
    keep_records(4, 7)
    ((name, found),) = kept(run_dir).items()
    assert name == f"{FLIGHT_DIR}/generation-4-rank-7-gloo.json"
    (status,) = list(json.loads(found)["pg_status"].values())[-1:]
    assert status["last_enqueued_collective"] == "2"


@pytest.mark.usefixtures("group")
def test_on_request_all_collectives_are_kept(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLIGHT_RECORDS_ENV, "all")
    keep_records(0, 0)
    (found,) = kept(run_dir).values()
    entries = json.loads(found)["entries"]
    assert [entry["profiling_name"] for entry in entries[-2:]] == ["gloo:all_reduce"] * 2


@pytest.mark.usefixtures("group")
def test_nothing_is_kept_by_default_or_without_a_run_directory(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FLIGHT_RECORDS_ENV)
    keep_records(0, 0)
    monkeypatch.setenv(FLIGHT_RECORDS_ENV, "active")
    monkeypatch.delenv(RUN_DIR_ENV)
    keep_records(0, 0)
    assert kept(run_dir) == {}


@pytest.mark.usefixtures("group")
def test_a_recorder_that_does_not_answer_or_raises_holds_nobody_up(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()

    def hangs(**arguments: bool) -> bytes:
        gate.wait(60)
        return b""

    def raises(**arguments: bool) -> bytes:
        raise RuntimeError("no such thing")

    module: Any = torch._C._distributed_c10d
    monkeypatch.setattr(flight_recorder, "_TAKE_S", 0.1)
    monkeypatch.setattr(module, "_dump_fr_trace_json", raises)
    with caplog.at_level(logging.WARNING):
        keep_records(0, 0)
        assert "cannot be read" in caplog.text
        monkeypatch.setattr(module, "_dump_fr_trace_json", hangs)
        began_s = time.monotonic()
        keep_records(0, 0)
        assert time.monotonic() - began_s < 30
        assert "rank 0: torch's flight recorder does not answer" in caplog.text
    gate.set()
    assert kept(run_dir) == {}


@pytest.mark.usefixtures("group")
def test_another_choice_is_said_and_taken_for_none(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(FLIGHT_RECORDS_ENV, "most")
    with caplog.at_level(logging.WARNING):
        keep_records(0, 0)
    assert "is one of active, all, none, not 'most': none" in caplog.text
    assert kept(run_dir) == {}


@pytest.mark.usefixtures("group")
def test_without_threads_nothing_is_kept(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(threading.Thread, "start", start)
        keep_records(0, 0)
    assert "torch's flight recorder is not read: can't start new thread" in caplog.text
    assert kept(run_dir) == {}


@pytest.mark.parametrize(("size", "entries"), [("0", 0), ("5", 2)])
def test_the_variable_of_the_agent_is_what_torch_reads(size: str, entries: int) -> None:
    """With a size of 0, a rank on CPUs records nothing that would lie between its tensors."""
    code = (
        "import json, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "for _ in range(2): dist.all_reduce(torch.ones(3))\n"
        "print(len(json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get('entries', ())))\n"
    )
    env = {**os.environ, TORCH_FR_BUFFER_SIZE_ENV: size}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert (said.returncode, said.stdout.split()) == (0, [str(entries)]), said.stderr
