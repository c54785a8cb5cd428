"""Test what a rehearsal makes of runs that differ, and which point of the contract it names."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from checkpointless.observability.report.verify import Difference, Quantity
from checkpointless.observability.telemetry.steps import Recording, StepLog, StepRecord
from checkpointless.testing import rehearsal
from checkpointless.testing.jobs import Ended
from checkpointless.testing.rehearsal import _blamed, _Course, _judge, _Outcome, _Page, _Result, _Trial, _unsteady

FAULT = "exception@optimizer:rank=1,step=3"
COURSE = _Course(1, 4, 1)
LEFT_OUT = (
    "WARNING checkpointless.state.rank_local.declared: after a fault these begin anew: M.big (docs/contract.md, 2)"
)


def differs(quantity: Quantity, name: str = "", step: int = 3) -> Difference:
    return Difference(step, 0, quantity, "a", "b", None, name)


def run(*params: str, batch: str = "x", own: Mapping[str, str] | None = None) -> Recording:
    kept = None if own is None else dict(own)
    records = [StepRecord(n, "-", each, 1, "b", batch=batch, own=kept) for n, each in enumerate(params, 1)]
    return Recording({0: records}, {0: ()}, None)


@pytest.mark.parametrize(
    ("found", "said", "is_lightning", "points"),
    [
        ([differs(Quantity.PARAMS), differs(Quantity.OWN, "state.norms")], [], False, (3,)),
        ([differs(Quantity.PARAMS), differs(Quantity.OWN, "module.norms")], [], True, (2,)),
        ([differs(Quantity.LOSS), differs(Quantity.BATCH), differs(Quantity.OWN, "Mean.mean")], [], True, (5, 2)),
        ([differs(Quantity.BATCH)], ["declare it: state=... (docs/contract.md, 3)"], False, (5, 3)),
        ([differs(Quantity.CALLBACKS, "EMA")], [], True, (1,)),
        ([differs(Quantity.CALLBACKS, "EMA"), differs(Quantity.LOSS)], [], True, (4, 1)),
        ([differs(Quantity.LOSS), differs(Quantity.OWN, "state.norms")], [], False, (4, 3)),
        ([differs(Quantity.LOSS), differs(Quantity.OWN, "M.norms")], [LEFT_OUT], True, (2,)),
        ([differs(Quantity.PARAMS)], ["declare it: state=... (docs/contract.md, 3)"], False, (3,)),
        ([differs(Quantity.PARAMS)], [], False, (3, 4, 5)),
        ([differs(Quantity.PARAMS)], [], True, (2, 4, 5)),
        ([differs(Quantity.PARAMS), differs(Quantity.OWN, "random stream torch")], [], True, (5,)),
        ([differs(Quantity.PARAMS), differs(Quantity.BATCH, step=4)], [], False, (3, 4, 5)),
    ],
)
def test_what_differs_first_points_to_the_contract(
    found: list[Difference], said: list[str], is_lightning: bool, points: tuple[int, ...]
) -> None:
    assert _blamed(found, said, is_lightning) == points


def test_what_two_runs_compute_has_to_be_the_same_and_the_rest_is_left_out() -> None:
    steady = run("p", "q", own={"Speed.began": "1"})
    difference, without = _unsteady(steady, run("p", "q", own={"Speed.began": "2"}))
    assert (difference, without) == (None, {(Quantity.OWN, "Speed.began")})
    difference, _ = _unsteady(steady, run("p", "z"))
    assert difference is not None
    assert difference.step == 2


class Job:
    """A run directory of a job with a fault, made by hand."""

    def __init__(self, run_dir: Path, *params: str, has_fault: bool = True, said: str = "") -> None:
        log = StepLog(run_dir, 0)
        for step, each in enumerate(params, 1):
            log.record(step, None, each, buffers="b", batch="x")
        log.last_step()
        (run_dir / "logs").mkdir()
        (run_dir / "logs" / "rank-0.log").write_text(said)
        if has_fault:
            (run_dir / "faults").mkdir()
            (run_dir / "faults" / "0-0.json").write_text(f'{{"spec": "{FAULT}", "pid": 1}}')
        self.run_dir = run_dir

    def judged(self, code: int | None = None, *, in_time: bool = True) -> _Result:
        ended = Ended("fault-1", self.run_dir, code, 4, 1.0, in_time, ("rank 0 raised KeyError: 'x'",), (FAULT,))
        return _judge(_Trial(FAULT), ended, rehearsal._cut(run(*"pqrs"), COURSE, False), COURSE, frozenset(), False)


def test_a_run_with_the_same_steps_is_exact(tmp_path: Path) -> None:
    assert Job(tmp_path / "run", *"pqrs").judged().outcome is _Outcome.EXACT
    assert Job(tmp_path / "longer", *"pqrstu").judged().outcome is _Outcome.EXACT


def test_a_run_without_its_fault_proves_nothing(tmp_path: Path) -> None:
    assert Job(tmp_path / "run", *"pqrs", has_fault=False).judged().outcome is _Outcome.NOT_TRIED


def test_a_run_that_differs_is_inexact_with_what_the_engine_said_of_it(tmp_path: Path) -> None:
    found = Job(tmp_path / "run", *"pqRS", said=f"{LEFT_OUT}\nstep 3\n").judged()
    assert (found.outcome, found.why) == (_Outcome.INEXACT, "params of step 3 on rank 0 differs")
    assert found.points == (2,)
    assert found.said == (LEFT_OUT.partition(": ")[2],)
    assert Job(tmp_path / "short", *"pqr").judged().outcome is _Outcome.INEXACT


def test_a_finished_step_that_is_made_twice_is_not_exact(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", *"pqrs")
    StepLog(job.run_dir, 0).record(3, None, "r", buffers="b", batch="x")
    found = job.judged()
    assert (found.outcome, found.why) == (_Outcome.INEXACT, "repeated steps: 3 on rank 0 of run B")


def test_a_run_that_ends_is_not_recovered(tmp_path: Path) -> None:
    found = Job(tmp_path / "run", *"pq").judged(1)
    assert (found.outcome, found.why) == (_Outcome.NOT_RECOVERED, "rank 0 raised KeyError: 'x'")
    found = Job(tmp_path / "late", *"pq").judged(1, in_time=False)
    assert "did not end in time" in found.why


def test_the_page_ends_with_the_verdict_and_has_its_exit_status(tmp_path: Path) -> None:
    good = _Result(_Trial(FAULT), _Outcome.EXACT)
    bad = _Result(_Trial(FAULT), _Outcome.INEXACT, "params of step 3 on rank 0 differs", (3,), ("declare it",))
    page = _Page("train", course=COURSE, results=(good, good))
    assert (page.status, page.sentence) == (0, "exact: 4 steps on 1 rank, bit by bit, in 2 runs with a fault each")
    page = _Page("train", course=COURSE, results=(good, bad))
    assert page.status == 1
    inexact = f"inexact: after {FAULT}: params of step 3 on rank 0 differs"
    assert page.sentence == f"{inexact}; this points to docs/contract.md, 3 (declared state)"
    assert '"verdict": "inexact"' in page.as_json()
    page = _Page("train", "calm-1, which has no fault, failed: KeyError")
    assert (page.status, page.sentence) == (3, f"could not be rehearsed: {page.problem}")
