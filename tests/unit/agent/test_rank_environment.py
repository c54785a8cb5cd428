"""Test what the ranks of a node find in their environment."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from checkpointless.launcher.agent.launch import _rank_environment
from checkpointless.launcher.agent.launch_config import LaunchConfig

OLDER = "TORCH_NCCL_TRACE_BUFFER_SIZE"
TRACES, NO_LINES = "TORCH_SHOW_CPP_STACKTRACES", "TORCH_DISABLE_ADDR2LINE"


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        "OMP_NUM_THREADS",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "TORCH_FR_BUFFER_SIZE",
        OLDER,
        TRACES,
        NO_LINES,
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


CPU = {"CHECKPOINTLESS_CPU": "1"}
NVML, OMP, RECORDS = "PYTORCH_NVML_BASED_CUDA_CHECK", "OMP_NUM_THREADS", "TORCH_FR_BUFFER_SIZE"
SEVERAL: dict[str, Any] = {"nnodes": 2, "rdzv_endpoint": "here", "token": "t" * 32}


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
        (
            {"faults": ("raise@loss:rank=0,step=1",), "record_steps": True, "strict": True},
            {},
            {
                NVML: "1",
                "CHECKPOINTLESS_FAULTS": json.dumps(["raise@loss:rank=0,step=1"]),
                "CHECKPOINTLESS_RECORD_STEPS": "1",
                "CHECKPOINTLESS_STRICT": "1",
            },
        ),
    ],
)
def test_what_the_ranks_of_a_node_find_in_their_environment(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    user_set: dict[str, str],
    found: dict[str, str],
) -> None:
    for name, value in user_set.items():
        monkeypatch.setenv(name, value)
    config = LaunchConfig(**{"nproc_per_node": 1, "script": __file__, "run_dir": run_dir, **asked})
    always = {"CHECKPOINTLESS_RUN_DIR": str(run_dir), "PYTHONUNBUFFERED": "1"}
    assert _rank_environment(config) == always | found
