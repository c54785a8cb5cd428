"""The example with Hugging Face's Trainer comes through faults, by the five lines of its diff and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ranks.example_diffs import EXAMPLES, TRAINER, changed_lines, stock_script
from tests.ranks.jobs import TrainingsOf

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

ARGS = ("--steps", "7")
FAULTS = (
    "exception@before_optimizer:rank=1,step=2",
    "sigkill@optimizer:rank=0,step=4",
    "sigkill@between:rank=1,step=5",
)
PAGE = EXAMPLES.parent / "docs" / "transformers.md"


def test_the_example(trainings_of: TrainingsOf, tmp_path: Path) -> None:
    trainings = trainings_of(str(EXAMPLES / f"{TRAINER}.py"))
    rough = trainings.rough(2, ARGS, *FAULTS, steps=7)
    first, second, third = (incident.resumed_after for incident in rough.incidents)
    # Rank 1 makes the update of step 4 if it has the averaged gradients before the kill breaks its connection.
    assert (first, third) == (1, 5), rough.story()
    assert second in (3, 4), rough.story()

    stock = trainings_of(str(stock_script(TRAINER, tmp_path)))
    said = [
        re.findall(r"^step \d+: loss \d+\.\d+$", each.calm(2, *ARGS).log(0), re.M) for each in (stock, trainings)
    ]
    assert said[0] == said[1]
    assert len(said[0]) == 7


def test_its_size_and_its_page(tmp_path: Path) -> None:
    diff = (EXAMPLES / f"{TRAINER}.diff").read_text()
    added = [line for line in changed_lines(diff, "+") if line.strip()]
    assert len(added) <= 5
    assert len(stock_script(TRAINER, tmp_path).read_text().splitlines()) <= 60
    assert all(line in PAGE.read_text() for line in [*added, *changed_lines(diff, "-")])
