"""Test torchrun's options and variables: what works, what is accepted with one line, and what is refused in one."""

import argparse
import os
import re
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from checkpointless.cli import command, main
from checkpointless.cli.commands import run
from checkpointless.cli.commands.run import _ACCEPTED
from checkpointless.launcher.agent.launch_config import LaunchConfig
from tests.unit.cli.conftest import status_of

VALUES = {"--rdzv-backend": "c10d", "--numa-binding": "node"}


def start(words: str) -> int:
    os.environ["CHECKPOINTLESS_TOKEN"] = "x" * 32  # a job takes it away; the fixture puts back what was there
    return status_of(["run", *words.split(), "train.py"])


def torchruns() -> dict[str, argparse.Action]:
    """Return torchrun's options by their spelling with dashes."""
    found = {}
    for action in get_args_parser()._actions:
        for name in action.option_strings:
            if name.startswith("--") and "_" not in name and name != "--help":
                found[name] = action
    return found


def test_every_option_of_torchrun_is_known_in_each_spelling() -> None:
    parser = argparse.ArgumentParser()
    run._add_run_options(parser)
    ours = {name for action in parser._actions for name in action.option_strings}
    theirs = {name for flag, action in torchruns().items() for name in action.option_strings}
    assert len(theirs) > 40
    assert theirs <= ours


@pytest.mark.parametrize("flag", _ACCEPTED)
def test_what_has_no_meaning_is_accepted_with_one_line(
    flag: str, launched: list[LaunchConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    value = "" if _ACCEPTED[flag][1] is None else VALUES.get(flag, "1")
    assert start(f"{flag} {value}") == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "has no meaning here: " in line]
    assert len(told) == 1
    assert told[0].startswith(f"checkpointless: {flag} ")
    assert len(launched) == 1


def test_restarts_of_the_whole_job_are_allowed(launched: list[LaunchConfig]) -> None:
    assert start("--standalone --nproc-per-node=2 --max-restarts=3") == 0
    assert start("") == 0
    assert [config.max_restarts for config in launched] == [3, 0]
    assert start("--max-restarts -1") == 2


def test_a_launch_line_of_torchruns_documentation_starts(launched: list[LaunchConfig]) -> None:
    assert start("--standalone --nnodes=1 --nproc-per-node=2") == 0
    assert start("--nnodes=1:1 --nproc_per_node=2 --rdzv_id=1 --rdzv_backend=c10d --rdzv_endpoint=localhost:0") == 0
    assert start("--nnodes=2 --node-rank=1 --nproc-per-node=2 --master-addr=node0 --master-port=1234") == 0
    assert start("--nnodes=2 --node_rank=1 --nproc_per_node=2 --master_addr=node0") == 0
    assert [(config.nnodes, config.nproc_per_node) for config in launched] == [(1, 2), (1, 2), (2, 2), (2, 2)]
    assert [config.endpoint for config in launched[2:]] == [("node0", 1234), ("node0", 29400)]


@pytest.mark.parametrize(("gpus", "words"), [(4, "gpu auto"), (0, "auto cpu")])
def test_ranks_are_as_many_as_there_are_devices(
    gpus: int, words: str, launched: list[LaunchConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_count_cuda", lambda: gpus)
    for word in words.split():
        assert start(f"--nproc-per-node {word}") == 0
    assert {config.nproc_per_node for config in launched} == {gpus or len(os.sched_getaffinity(0))}


def test_only_the_chosen_local_ranks_are_shown(launched: list[LaunchConfig]) -> None:
    assert start("--nproc-per-node 4 --local-ranks-filter 0,2") == 0
    assert start("--nproc-per-node 4 --nnodes 2 --node-rank 1 --local-ranks-filter 3 --rdzv-endpoint a") == 0
    assert start("--nproc-per-node 2") == 0
    assert [config.shown_ranks for config in launched] == [[0, 2], [7], [0, 1]]


def test_variables_stand_for_options_which_win(
    launched: list[LaunchConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"NNODES": "2:2", "NPROC_PER_NODE": "3", "NODE_RANK": "1", "RDZV_ENDPOINT": "a:5"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    assert start("--nproc-per-node 2") == 0
    (config,) = launched
    assert (config.nnodes, config.nproc_per_node, config.node_rank, config.endpoint) == (2, 2, 1, ("a", 5))
    said = capsys.readouterr().err
    assert "from the environment: " in said
    assert "PET_NNODES=2:2" in said
    assert "PET_NPROC_PER_NODE" not in said


def test_every_option_with_a_meaning_has_its_variable(
    launched: list[LaunchConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", "7")
    monkeypatch.setenv("PET_LOG_DIR", str(tmp_path / "logs"))
    assert start("") == 0
    assert start("--term-grace 9 --log-dir other") == 0
    found = [(config.term_grace_s, config.logs) for config in launched]
    assert found == [(7.0, tmp_path / "logs"), (9.0, Path("other"))]
    monkeypatch.setenv("PET_NNODES", "x")
    assert main(["faults"]) == 0, "they matter to run alone"


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert re.fullmatch(r"checkpointless \d\S* \(torch \d\S*, Python 3\.\d+\.\d+\)\n", capsys.readouterr().out)
