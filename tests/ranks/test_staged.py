"""Test on CPU tensors the groups that the GPU suite stages through the host: results, aborts, and whole jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu import staged
from tests.gpu.isolated import run_ranks
from tests.gpu.jobs import LOOP, Undisturbed, check_equal, run

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 6
LIMIT_S = 190.0  # for a job, on a machine that is busy with others
HERE = "tests.ranks.test_staged"


@pytest.mark.long  # the job below needs all of it
def test_it_computes_what_gloo_does(tmp_path: Path) -> None:
    env = {"CHECKPOINTLESS_RUN_DIR": str(tmp_path)}
    found = run_ranks(f"{HERE}:collectives", 3, 120.0, env=env)
    assert found == [
        {
            "reduced": [3.0, 6.0],
            "bf16": [3.0, 6.0],
            "gathered": [0.0, 1.0, 1.0, 2.0, 2.0, 3.0],
            "scattered": [3.0 * value for value in ([0.0, 1.0], [1.0, 2.0], [2.0, 3.0])[rank]],
            "exchanged": [rank, rank + 10.0, rank + 20.0],
            "received": [(rank - 1) % 3],
        }
        for rank in range(3)
    ]


def collectives() -> dict[str, Any]:
    """Return the results of collectives and messages, under torch's names of both 2.11 and 2.13."""
    staged.install()
    staged.install()
    dist.init_process_group(staged.BACKEND)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(2.0) + rank
    reduced, half = mine.clone(), mine.to(torch.bfloat16)
    works = [dist.all_reduce(each, async_op=True) for each in (reduced, half)]
    for work in works:
        work.wait()
    group: Any = dist.group.WORLD
    gathered, scattered, exchanged = torch.empty(2 * size), torch.empty(2), torch.empty(size)
    group._allgather_base(gathered, mine).wait()
    options = dist.ReduceScatterOptions()
    group._reduce_scatter_base(scattered, gathered, options).wait()
    group.alltoall_base(exchanged, torch.arange(float(size)) + 10 * rank, [], [], dist.AllToAllOptions()).wait()
    received = torch.empty(1)
    ring = [
        dist.P2POp(dist.isend, mine[:1].clone(), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    dist.barrier()
    return {
        "reduced": reduced.tolist(),
        "bf16": half.tolist(),
        "gathered": gathered.tolist(),
        "scattered": scattered.tolist(),
        "exchanged": exchanged.tolist(),
        "received": received.tolist(),
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp, LIMIT_S)


@pytest.mark.parametrize(
    ("faults", "replaced"),
    [
        (("exception@backward:rank=2,step=3", "sigkill@before_optimizer:rank=1,step=5"), [(), (1,)]),
        pytest.param(
            ("segfault@optimizer:rank=3,step=3", "exception@sync:rank=0,step=5"),
            [(3,), ()],
            marks=pytest.mark.long,
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
