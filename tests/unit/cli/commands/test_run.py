"""Test ``checkpointless run --dry-run``: what a script says of replicas, without being run."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointless.cli import main
from checkpointless.cli.script_holders import holders_in

EXAMPLES = Path(__file__).parents[4] / "examples"
NOT_KNOWN = "how many ranks hold each part of the state is not known without running it"
COPIES = "manager = CheckpointManager(tiers=[NeighborMemory()])\n"


@pytest.mark.parametrize(
    ("source", "said", "is_alone"),
    [
        (
            "s = CheckpointlessModelParallelStrategy(4)",
            "(replicas=1): no replicas of divided parameters, a rank that dies could not",
            True,
        ),
        ("s = strategies.CheckpointlessModelParallelStrategy(4, replicas=2)", "2 ranks hold each part", False),
        (
            "s = CheckpointlessMegatronStrategy(num_distributed_optimizer_instances=1)",
            "no replicas of the optimizer's shards",
            True,
        ),
        ("s = CheckpointlessMegatronStrategy(ddp=ddp)", "2 ranks hold each part", False),
        ("d = DistributedDataParallelConfig(use_distributed_optimizer=True)", "no replicas", True),
        (COPIES + "s = CheckpointlessModelParallelStrategy(4)", "copies are kept in tiers", False),
        ("m = DistributedDataParallel(m)", "every rank holds the whole state", False),
        (
            "from torch.nn.parallel import DistributedDataParallel as DDP\nm = DDP(m)",
            "DistributedDataParallel: every rank holds the whole state",
            False,
        ),
    ],
)
def test_what_is_written_as_a_number_is_known(source: str, said: str, is_alone: bool) -> None:
    (finding,) = holders_in(source)
    assert said in finding.text
    assert finding.text.startswith(f"line {source.count(chr(10)) + 1}: ")
    assert finding.is_alone is is_alone


@pytest.mark.parametrize(
    "source",
    [
        "s = CheckpointlessModelParallelStrategy(4, replicas=options.replicas)",
        "s = CheckpointlessModelParallelStrategy(**options)",
        "d = DistributedDataParallelConfig()",
        "fully_shard(model, mesh=mesh)",
        "this is no Python",
    ],
)
def test_what_is_not_written_is_not_claimed(source: str) -> None:
    assert holders_in(source) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "train_lightning_hsdp",
            "CheckpointlessModelParallelStrategy(replicas=2): 2 ranks hold each part",
        ),
        ("train_lightning", "CheckpointlessDDPStrategy: every rank holds the whole state."),
        ("train_hsdp", NOT_KNOWN),
    ],
)
def test_a_dry_run_starts_nothing(capsys: pytest.CaptureFixture[str], name: str, said: str) -> None:
    script = str(EXAMPLES / f"{name}.py")
    assert main(["run", "--nproc-per-node", "4", "--dry-run", script, "--steps", "5"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"would start 4 ranks of {script} on this node"
    assert said in "\n".join(lines)


def test_a_script_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "--dry-run", str(tmp_path / "no.py")]) != 0
    assert "cannot be read" in capsys.readouterr().err
