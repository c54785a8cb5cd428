"""The benchmark of the decision makes ranks' reports itself, and so has to follow them."""

from __future__ import annotations

import json

import pytest

from benchmarks.decide.run import Case, answers_of, measure

RANKS, GROUP = 200, 8


@pytest.mark.parametrize("case", Case)
def test_every_case_comes_to_what_it_must_come_to(case: Case) -> None:
    timing = measure(json.dumps(answers_of(case, RANKS, GROUP)), case, RANKS, GROUP)
    assert (timing.case, timing.ranks, timing.group) == (case.value, RANKS, GROUP)
    assert timing.decide_s > 0
