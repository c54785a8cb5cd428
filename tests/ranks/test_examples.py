"""Each script of ``examples/`` comes through faults with the same bits, by its diff and no other line."""

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.example_diffs import EXAMPLES, FULL, TRAINER, WITH_DIFF, changed_lines, ranks_of, stock_script
from tests.ranks.jobs import Trainings, TrainingsOf
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

HERE = ("train_ddp", "train_megatron")  # dist-check trains the others through faults
STEPS, MOST_LINES, MOST_OF_A_SCRIPT = 7, 5, 61
FAULTS = (
    "exception@before_optimizer:rank=1,step=2",
    "sigkill@optimizer:rank=0,step=4",
    "sigkill@between:rank=1,step=5",
)
EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in HERE else pytest.mark.long) for name in WITH_DIFF]
)
# Megatron-core trains on GPUs only; --cpu has our platform installed by MegatronTraining.
ON_CPU = "from checkpointless.integrations.megatron import cpu_platform\n\ncpu_platform.install()\n"


ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # Accelerate asks for the number of cores else
ARGS = ("--steps", str(STEPS))
OfExample = Callable[[str], Trainings]


@pytest.fixture
def trainings(trainings_of: TrainingsOf) -> OfExample:
    return lambda name: trainings_of(str(EXAMPLES / f"{name}.py"))


def printed_by(script: str, args: list[str]) -> str:
    """Run a script in this rank, which torchrun could have started, and return what it prints."""
    sys.argv = [script, *args]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(script, run_name="__main__")
    return said.getvalue()


def _losses(printed: str) -> list[str]:
    return re.findall(r"^step \d+: loss \d+\.\d+$", printed, re.M)


@EACH
def test_an_example_comes_through_faults(trainings: OfExample, name: str) -> None:
    rough = trainings(name).rough(ranks_of(name), ARGS, *FAULTS, steps=STEPS)
    first, second, third = (incident.resumed_after for incident in rough.incidents)
    # Rank 1 makes the update of step 4 if it has the averaged gradients before the kill breaks its connection.
    assert (first, third) == (1, 5), rough.story()
    assert second in (3, 4), rough.story()
    assert len({record.loss for record in rough.steps[0]}) == STEPS, "each step has another loss"


@EACH
def test_without_the_lines_of_its_diff_an_example_is_anybodys_script(
    nemo_zygote: Zygote, tmp_path: Path, trainings: OfExample, name: str
) -> None:
    """The script to which the diff is applied computes the same."""
    plain = stock_script(name, tmp_path)
    if name == "train_megatron":
        plain.write_text(ON_CPU + plain.read_text())
    arguments = {"script": str(plain), "args": ARGS}
    without, *_ = nemo_zygote.run(
        ranks_of(name), "tests.ranks.test_examples:printed_by", arguments, env=ONE_THREAD, limit_s=200.0
    )
    assert _losses(without) == _losses(trainings(name).calm(ranks_of(name), *ARGS).log(0))
    assert len(_losses(without)) == (0 if "lightning" in name else STEPS)


@pytest.mark.parametrize("name", WITH_DIFF)
def test_the_diff_of_an_example_is_short(tmp_path: Path, name: str) -> None:
    added = changed_lines((EXAMPLES / f"{name}.diff").read_text(), "+")
    assert 0 < len([line for line in added if line.strip()]) <= MOST_LINES
    assert len(stock_script(name, tmp_path).read_text().splitlines()) <= MOST_OF_A_SCRIPT


def test_every_script_has_its_diff() -> None:
    """NeMo's are in the README; the changed lines of Bridge's and Megatron-LM's are marked."""
    without = {"train_gpt", "train_bridge", "train_megatron_lm", "train_torchtitan"}
    scripts = {path.stem for path in EXAMPLES.glob("train_*.py")} - without
    assert scripts == {*WITH_DIFF, *FULL, TRAINER}
