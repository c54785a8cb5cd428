"""Test what ``--record-steps`` records of real jobs, and that ``verify`` sees in it what it must."""

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointless.observability.report.verify import Quantity, Steps, compare
from tests.ranks.jobs import Disturb, Job, run_job, small
from tests.ranks.layouts import with_checkpoints
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

OVERLAP = ("strategy.ddp.overlap_grad_reduce=true", "strategy.ddp.overlap_param_gather=true")
STEPS = 6


def train(zygote: Zygote, run_dir: Path, *changes: str, saves: bool = True) -> Job:
    """Run a job that validates every two steps and, with ``saves``, writes NeMo's checkpoints."""
    return run_job(
        zygote,
        run_dir,
        2,  # each starts a process for its first save, which imports torch
        heartbeat_timeout_s=60.0,  # a save is silent, and takes long on a busy machine
        args=(
            *small(2, STEPS),
            "trainer.limit_val_batches=2",
            "trainer.val_check_interval=2",
            *(with_checkpoints(run_dir / "nemo") if saves else ()),
            *changes,
        ),
    )


AVERAGE = "callbacks.average={_target_: tests.ranks.job_callbacks.Average}"


def test_callbacks_validations_and_checkpoints_are_recorded_and_compared(
    nemo_zygote: Zygote, tmp_path: Path
) -> None:
    first, again = (train(nemo_zygote, tmp_path / name, AVERAGE) for name in ("first", "again"))
    verdict = compare(first.steps, again.steps)
    assert verdict.equal, verdict.sentence
    assert verdict.not_compared == ()
    steps = first.steps
    extras = steps[0][-1]
    assert extras.buffers is not None
    assert extras.data is not None
    assert [float.fromhex(rate) for rate in extras.lr or ()] == pytest.approx([1e-3] * len(extras.lr or ()))
    assert any("Average" in key for key in extras.callbacks or ())
    assert len({record.data for record in steps[0]}) == STEPS, "the data moves on with every step"
    assert [record.step for record in steps.validations[1]] == [2, 4, 6]
    losses = [float.fromhex(record.metrics["val_loss"]) for record in steps.validations[0]]
    assert losses == sorted(losses, reverse=True)
    assert steps.checkpoints is not None
    (names,) = steps.checkpoints
    assert any("consumed_samples=48" in name for name in names), names
    assert any(name.endswith("-last") for name in names), names

    wrong = "callbacks.average={_target_: tests.ranks.job_callbacks.Average, wrong_from: 4}"
    other = compare(first.steps, train(nemo_zygote, tmp_path / "wrong", wrong, saves=False).steps)
    assert other.difference is not None
    assert (other.difference.quantity, other.difference.step) == (Quantity.CALLBACKS, 4)
    assert other.sentence.startswith("not equal: state of callback Average of step 4 on rank 0 differs")


def test_parameters_are_whole_where_their_gather_is_left_to_the_next_step(
    disturb: Disturb, undisturbed: Callable[..., Steps]
) -> None:
    """The losses are the same whether the gather is finished for the recorder or never was put off."""
    job = disturb(4, 4, "sigkill@backward:rank=1,step=2", "sigkill@after_optimizer:rank=2,step=3", args=OVERLAP)
    job.assert_same(undisturbed(4, small(4, 4)))
