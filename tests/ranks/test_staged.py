"""Test on CPU tensors the groups that the GPU suite stages through the host: jobs in which they are aborted."""

from pathlib import Path

import pytest

from tests.gpu.jobs import LOOP, Undisturbed, check_equal, run

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 6
LIMIT_S = 190.0  # for a job, on a machine that is busy with others


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp, LIMIT_S)


@pytest.mark.parametrize(
    ("faults", "replaced"),
    [
        (("exception@backward:rank=2,step=3", "sigkill@before_optimizer:rank=1,step=5"), [(), (1,)]),
        pytest.param(
            ("segfault@optimizer:rank=3,step=3", "exception@sync:rank=0,step=5"), [(3,), ()], marks=pytest.mark.long
        ),
    ],
    ids=["exception-and-kill", "in-the-update"],
)
def test_a_plain_loop_in_bf16_whose_reductions_overlap_the_backward_pass(
    tmp_path: Path, undisturbed: Undisturbed, faults: tuple[str, ...], replaced: list[tuple[int, ...]]
) -> None:
    args = ("--steps", str(STEPS), "--dtype", "bf16")
    without = undisturbed(LOOP, *args)
    job = run(tmp_path / "run", LOOP, *args, faults=faults, limit_s=LIMIT_S)
    check_equal(without, job, faults, STEPS)
    assert [incident.respawned for incident in job.incidents] == replaced, job.story()
