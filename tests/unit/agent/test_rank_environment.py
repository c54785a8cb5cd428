"""Test what the ranks of a node find in their environment."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from checkpointless.launcher.agent.launch_config import LaunchConfig, rank_environment

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


def environment(run_dir: Path, nproc: int = 1, **more: Any) -> dict[str, str]:
    """Return what is set besides what every rank gets."""
    found = rank_environment(LaunchConfig(nproc_per_node=nproc, script=__file__, run_dir=run_dir, **more))
    assert found.pop("CHECKPOINTLESS_RUN_DIR") == str(run_dir)
    assert found.pop("PYTHONUNBUFFERED") == "1"
    if not more.get("cpu"):
        assert found.pop("PYTORCH_NVML_BASED_CUDA_CHECK") == "1"
    return found


def test_an_import_that_asks_for_a_gpu_does_not_initialise_cuda_unless_the_user_wants_that(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in rank_environment(
        LaunchConfig(nproc_per_node=1, script=__file__, run_dir=run_dir)
    )


def test_one_rank_that_is_asked_for_nothing_gets_nothing_more(run_dir: Path) -> None:
    assert environment(run_dir) == {}


def test_what_was_asked_for_reaches_the_ranks(run_dir: Path) -> None:
    found = environment(
        run_dir, cpu=True, faults=("sigkill@forward:rank=0,step=1",), record_steps=True, strict=True
    )
    assert json.loads(found.pop("CHECKPOINTLESS_FAULTS")) == ["sigkill@forward:rank=0,step=1"]
    assert found == {
        "CHECKPOINTLESS_CPU": "1",
        "CHECKPOINTLESS_RECORD_STEPS": "1",
        "CHECKPOINTLESS_STRICT": "1",
        "TORCH_FR_BUFFER_SIZE": "0",
    }


@pytest.mark.parametrize(
    ("name", "value", "is_set"),
    [
        ("TORCH_FR_BUFFER_SIZE", "500", False),
        (OLDER, "500", False),
    ],
)
def test_collectives_on_cpus_are_recorded_by_torch_if_somebody_wants_them(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_set: bool
) -> None:
    monkeypatch.setenv(name, value)
    assert ("TORCH_FR_BUFFER_SIZE" in environment(run_dir, cpu=True)) == is_set
    monkeypatch.delenv(name)
    expected = {"CHECKPOINTLESS_CPU": "1", name: value, **({"TORCH_FR_BUFFER_SIZE": "0"} if is_set else {})}
    assert environment(run_dir, cpu=True, extra_env={name: value}) == expected


def test_no_rank_looks_up_source_lines_in_processes_that_others_use_too(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork of the zygote has the pipes of the zygote's addr2line."""
    monkeypatch.setenv(TRACES, "1")
    assert environment(run_dir) == {NO_LINES: "1"}
    monkeypatch.setenv(NO_LINES, "0")
    assert environment(run_dir) == {}


def test_several_ranks_share_the_cores_unless_the_user_said_how(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment(run_dir, 2) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environment(run_dir, 2) == {}


def test_ranks_of_several_nodes_know_their_agent(run_dir: Path) -> None:
    found = environment(run_dir, nnodes=2, rdzv_endpoint="here", token="t" * 32)
    assert found == {"CHECKPOINTLESS_AGENT_PID": str(os.getpid())}


def test_what_the_caller_adds_wins(run_dir: Path) -> None:
    assert environment(run_dir, 2, extra_env={"OMP_NUM_THREADS": "2", "X": ""}) == {"OMP_NUM_THREADS": "2", "X": ""}
