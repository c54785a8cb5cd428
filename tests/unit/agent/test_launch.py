"""Test what a node refuses to run, what its ranks find in their environment, and what is said last."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from checkpointless.launcher.agent import launch
from checkpointless.launcher.agent.launch import _rank_environment
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.launcher.protocol.messages import End
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog
from tests.unit.agent.commanded_node import SEVERAL


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device_check": "no-such-program -x"}, "'no-such-program -x' cannot be run: there is no such program"),
        ({"device_check": " "}, "there is no such program"),
        ({"device_check": "sh -c 'exit"}, "cannot be run: No closing quotation"),
        ({"device_check": "true", "regroup_timeout_s": 30.0}, "30 s must be less than --regroup-timeout, 30 s"),
        ({"script": "nowhere.py"}, "no script 'nowhere.py'"),
        ({"script": "nowhere.at.all", "module": True}, "no module 'nowhere.at.all'"),
    ],
)
def test_a_wrong_value_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {"nproc_per_node": 2, "script": __file__, "run_dir": tmp_path}
    LaunchConfig(**good)
    with pytest.raises(ValueError, match=said):
        LaunchConfig(**good | change)


@pytest.mark.parametrize(
    ("node", "own"), [(0, range(0, 2)), (1, range(2, 4)), (2, range(0))], ids=["first", "second", "spare"]
)
def test_a_node_runs_the_ranks_of_its_number_and_a_spare_runs_none(tmp_path: Path, node: int, own: range) -> None:
    config = LaunchConfig(nproc_per_node=2, script=__file__, run_dir=tmp_path, spares=1, node_rank=node, **SEVERAL)
    assert config.own_ranks == own


CPU = {"CHECKPOINTLESS_CPU": "1"}
NVML, OMP, RECORDS = "PYTORCH_NVML_BASED_CUDA_CHECK", "OMP_NUM_THREADS", "TORCH_FR_BUFFER_SIZE"
OLDER = "TORCH_NCCL_TRACE_BUFFER_SIZE"
TRACES, NO_LINES = "TORCH_SHOW_CPP_STACKTRACES", "TORCH_DISABLE_ADDR2LINE"
FAULT = "raise@loss:rank=0,step=1"
Variables = dict[str, str]


@pytest.mark.parametrize(
    ("asked", "user_set", "found"),
    [
        ({}, {}, {NVML: "1"}),
        ({}, {NVML: "0"}, {}),  # else an import that asks for a GPU would initialise CUDA
        ({"cpu": True}, {}, {**CPU, RECORDS: "0"}),
        ({"cpu": True}, {RECORDS: "500"}, CPU),
        ({"cpu": True}, {OLDER: "500"}, CPU),
        ({"cpu": True, "extra_env": {OLDER: "500"}}, {}, {**CPU, OLDER: "500"}),
        # A fork of the zygote has the pipes of the zygote's addr2line.
        ({}, {TRACES: "1"}, {NVML: "1", NO_LINES: "1"}),
        ({}, {TRACES: "1", NO_LINES: "0"}, {NVML: "1"}),
        ({"nproc_per_node": 2}, {}, {NVML: "1", OMP: "1"}),
        ({"nproc_per_node": 2}, {OMP: "3"}, {NVML: "1"}),
        ({"nproc_per_node": 2, "extra_env": {OMP: "2", "X": ""}}, {}, {NVML: "1", OMP: "2", "X": ""}),
        (SEVERAL, {}, {NVML: "1", "CHECKPOINTLESS_AGENT_PID": str(os.getpid())}),
        ({"faults": (FAULT,)}, {}, {NVML: "1", "CHECKPOINTLESS_FAULTS": json.dumps([FAULT])}),
        ({"record_steps": True}, {}, {NVML: "1", "CHECKPOINTLESS_RECORD_STEPS": "1"}),
        ({"strict": True}, {}, {NVML: "1", "CHECKPOINTLESS_STRICT": "1"}),
    ],
)
def test_what_the_ranks_of_a_node_find_in_their_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], user_set: Variables, found: Variables
) -> None:
    for name in (OMP, NVML, RECORDS, OLDER, TRACES, NO_LINES):
        monkeypatch.delenv(name, raising=False)
    for name, value in user_set.items():
        monkeypatch.setenv(name, value)
    config = LaunchConfig(**{"nproc_per_node": 1, "script": __file__, "run_dir": tmp_path, **asked})
    always = {"CHECKPOINTLESS_RUN_DIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    assert _rank_environment(config) == always | found


def test_events_that_may_be_lost_are_said_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.scribe, "flush", lambda: False)
    said: list[str] = []
    config = LaunchConfig(nproc_per_node=1, script=__file__, run_dir=tmp_path)
    events = EventLog(tmp_path / EVENTS_FILE, node=0)
    assert launch._conclude(End(1, ["the end"]), 3, -1, config, events, said.append) == 1
    assert said == [f"the disk of {tmp_path} does not answer: the last events of node 0 may be lost", "the end"]
