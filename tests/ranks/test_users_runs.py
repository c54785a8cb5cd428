"""Test that everything that users' runs end in is the same with faults as without."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from checkpointless.faults.ledger import fired
from tests.ranks.jobs import Job
from tests.ranks.users import cases
from tests.ranks.users.cases import CASES, LARGE, LONG_SHORT, METRICS, OWN, SHORT_LONG, STARTS, VALIDATES, Case
from tests.ranks.users.defects import DEFECT_ENV
from tests.ranks.users.end import BREAKS_ENV, IN_ALL, broken, compare_ends, read_ends
from tests.ranks.users.processes import replaced_healthy
from tests.ranks.users.runs import Run, Runs

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(500)]


def _param(case: Case) -> Any:
    marks = [pytest.mark.long] if case.is_long else []
    return pytest.param(case, id=case.name.replace(" ", "-").replace(",", ""), marks=marks)


@pytest.mark.parametrize("case", [_param(case) for case in CASES])
def test_a_users_run_ends_as_without_faults(runs: Runs, case: Case) -> None:
    run = case.run
    undisturbed = runs.calm(run)
    late = case.saves_end_before
    words = ("--saves-end-before", str(late)) if late else ()
    job = runs.make(replace(run, layout=(*run.layout, *words)), *case.faults)
    equal(run, undisturbed, job, case.apart)
    assert replaced_healthy(job.run_dir, range(run.nproc)) == ()


def test_buffers_that_are_too_large_to_be_kept_are_no_peers_to_give(runs: Runs) -> None:
    spec = "sigkill@before_optimizer:rank=1,step=4"
    job = runs.make(LARGE, spec, code=1)
    assert fired(job.run_dir) == {spec: 1}
    logs = "".join(job.log(rank) for rank in range(LARGE.nproc))
    assert logs.count("large of the modules' buffers differ from rank to rank") == 1
    assert "torch.nn.SyncBatchNorm" in logs
    assert any(
        "the process of rank 1 was lost, and large of its modules' buffers are too large" in each
        for each in job.said
    )


KILL_AND_LOSS = ("sigkill@forward:rank=0,step=4", "node@before_optimizer:rank=2,step=4")


@pytest.mark.parametrize(
    ("run", "faults"),
    [
        # Its replica of what the lost node had is in a process that has not committed anything itself.
        pytest.param(OWN, KILL_AND_LOSS, id="after-a-kill"),
        *(
            pytest.param(run, faults, id=name, marks=pytest.mark.long)
            for name, run, *faults in (
                ("first-epoch", OWN, "node@backward:rank=2,step=3"),
                ("second-epoch", OWN, "node@backward:rank=3,step=7"),
                ("after-a-replay", OWN, cases.SLOW, *KILL_AND_LOSS),
                ("after-a-recovery", OWN, "exception@forward:rank=0,step=4", "node@before_optimizer:rank=3,step=4"),
                ("own-generator", cases.OWN_GENERATOR, "node@backward:rank=2,step=7"),
            )
        ),
    ],
)
def test_what_was_a_lost_nodes_own_is_kept_by_another(runs: Runs, run: Run, faults: tuple[str, ...]) -> None:
    undisturbed = runs.calm(run)
    job = runs.make(replace(run, nproc=2), *faults, nnodes=2, node_timeout_s=4.0, spares=1, lost=(1,))
    equal(run, undisturbed, job, IN_ALL)


@pytest.mark.parametrize(
    ("run", "where", "how"),
    [
        pytest.param(LONG_SHORT, "setup 1", "kill", id="set-up-of-a-shorter-fit-kill", marks=pytest.mark.long),
        pytest.param(VALIDATES, "validate 0", "raise", id="validation-after-the-first-raise"),
        *(
            pytest.param(*row, id=name, marks=pytest.mark.long)
            for *row, name in (
                (LONG_SHORT, "setup 1", "raise", "set-up-of-a-shorter-fit-raise"),
                (SHORT_LONG, "setup 1", "raise", "set-up-of-a-longer-fit-raise"),
                (SHORT_LONG, "setup 1", "kill", "set-up-of-a-longer-fit-kill"),
                (VALIDATES, "validate 0", "kill", "validation-after-the-first-kill"),
                (VALIDATES, "validate 1", "raise", "after-the-second-raise"),
                (VALIDATES, "validate 1", "kill", "after-the-second-kill"),
            )
        ),
    ],
)
def test_a_fault_outside_of_training(runs: Runs, run: Run, where: str, how: str) -> None:
    undisturbed = runs.calm(run)
    job = runs.make(run, extra_env={BREAKS_ENV: f"{how} {where}"})
    assert broken(job.run_dir) == 1
    assert len(job.incidents) == 1
    equal(run, undisturbed, job, cases.NOT_REFITTED if where == "validate 1" else cases.CALLED_AGAIN)


@pytest.mark.parametrize(
    ("defect", "run", "faults"),
    [
        ("buffers_are_a_peers", cases.OWN_BUFFERS, ("sigkill@before_optimizer:rank=1,step=4",)),
        pytest.param("callbacks_are_a_step_ahead", cases.KEEPERS, cases.LATE, marks=pytest.mark.long),
        *(
            pytest.param(defect, run, (fault,), marks=pytest.mark.long)
            for defect, run, fault in (
                ("buffers_are_not_taken_back", cases.BATCHNORM, "exception@before_optimizer:rank=1,step=4"),
                ("validations_are_repeated", cases.STOPS, "exception@before_optimizer:rank=1,step=5"),
                ("entry_streams_are_stale", cases.RANDPERM, "exception@before_optimizer:rank=1,step=4"),
                ("accumulated_metrics_begin_anew", METRICS, "exception@forward:rank=1,step=7"),
                ("accumulated_metrics_are_a_peers", METRICS, "sigkill@forward:rank=1,step=7"),
                ("what_a_step_has_logged_is_lost", METRICS, "exception@after_optimizer:rank=1,step=3"),
                ("batches_are_counted_anew", STARTS, "exception@forward:rank=1,step=4"),
                ("attributes_are_a_step_ahead", STARTS, "exception@forward:rank=1,step=4"),
            )
        ),
    ],
)
def test_a_defect_is_seen(runs: Runs, defect: str, run: Run, faults: tuple[str, ...]) -> None:
    undisturbed = runs.calm(run)
    job = runs.make(run, *faults, extra_env={DEFECT_ENV: defect})
    assert len(job.incidents) == 1, job.story()  # the defect itself was installed without one
    with pytest.raises(AssertionError, match=r"difference|not equal|differs"):
        equal(run, undisturbed, job, IN_ALL)


def test_several_training_loaders_are_refused_before_the_first_step(runs: Runs) -> None:
    job = runs.make(Run("two-loaders"), code=1)
    assert "cannot bring 2 training dataloaders back to where each of them stood" in job.said[-1]
    assert "ConcatDataset" in job.said[-1]
    with pytest.raises(FileNotFoundError, match="no recorded steps"):
        _ = job.steps


def equal(run: Run, undisturbed: Job, job: Job, apart: Iterable[str] = ()) -> None:
    expected, found = (read_ends(each.run_dir, run.nproc) for each in (undisturbed, job))
    parts = frozenset(expected[0]) - frozenset(apart)
    different = [str(each) for each in compare_ends(expected, found, parts=parts)]
    assert not different, "\n".join([f"{len(different)} differences", *different[:12], job.story()])
    if not isinstance(run.steps, int):
        return  # the record of steps does not know of fits
    job.assert_same(undisturbed.steps)
