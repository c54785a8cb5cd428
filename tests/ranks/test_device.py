"""Test real NeMo jobs on a device that behaves like a GPU: faults change no bit and replace nobody healthy."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks.jobs import Job, Trainings, run_job
from tests.ranks.nemo_zygote import ROOT, Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

SCRIPT = str(ROOT / "tests" / "device" / "train.py")
SETTINGS = {"heartbeat_timeout_s": 10.0, "limit_s": 200.0}
STEPS = 6
DP4: tuple[str, ...] = ()
DP4_GRAPHS = ("--graphs",)
TP2_PP2 = ("--tensor-parallel", "2", "--pipeline-parallel", "2")
RANKS = {DP4: 4, DP4_GRAPHS: 4, TP2_PP2: 8}


@pytest.fixture(scope="module")
def train(trainings: Trainings) -> Callable[..., Job]:
    def make(layout: tuple[str, ...], *faults: str) -> Job:
        return trainings.rough(RANKS[layout], ("--steps", str(STEPS), *layout), *faults, steps=STEPS)

    return make


@pytest.mark.parametrize(
    ("layout", "faults", "replaced"),
    [
        pytest.param(
            DP4,
            ("segfault@optimizer:rank=3,step=3", "exception@sync:rank=0,step=5"),
            [(3,), ()],
            marks=pytest.mark.long,
        ),
        (DP4, ("cuda@before_optimizer:rank=1,step=4", "exception@recovery:rank=2,step=3"), [(1,), ()]),
        pytest.param(DP4, ("hang@forward:rank=1,step=4",), [(1,)], marks=pytest.mark.long),
        pytest.param(  # test_device_faults.py has graphs
            DP4_GRAPHS,
            ("sigkill@backward:rank=1,step=3", "exception@data:rank=2,step=5"),
            [(1,), ()],
            marks=pytest.mark.long,
        ),
        pytest.param(
            TP2_PP2,
            ("sigkill@backward:rank=3,step=3", "hang@forward:rank=1,step=5"),
            [(3,), (1,)],
            marks=pytest.mark.long,
        ),
    ],
    ids=["in-the-update", "while-communicators-are-made", "hang", "graphs", "tensors-and-pipelines"],
)
def test_faults_change_no_bit_and_take_nobody_with_them(
    train: Callable[..., Job], layout: tuple[str, ...], faults: tuple[str, ...], replaced: list[tuple[int, ...]]
) -> None:
    job = train(layout, *faults)
    assert [incident.respawned for incident in job.incidents] == replaced, job.story()


P = 3_294_720  # parameters; training in bf16 holds 12.2 bytes for each, and 13.2 at most in a step


def wide(zygote: Zygote, run_dir: Path, *faults: str, args: tuple[str, ...], code: int = 0) -> Job:
    settings: Any = {"script": str(ROOT / "tests" / "device" / "wide.py"), "heartbeat_timeout_s": 30.0}
    return run_job(zygote, run_dir, 4, args=args, faults=faults, code=code, limit_s=200.0, **settings)


def test_a_reentry_in_which_all_is_built_anew_fits_into_a_fifth_more_memory(
    nemo_zygote: Zygote, tmp_path: Path
) -> None:
    """Some ranks are interrupted in a backward pass, and one between its update and the next ``zero_grad``."""
    args = ("--cold", "--bytes", str(15 * P), "--lingers", "0")
    job = wide(nemo_zygote, tmp_path / "run", "exception@forward:rank=2,step=3", args=args)
    assert [incident.respawned for incident in job.incidents] == [()]


COUNTS = pytest.mark.parametrize("count", [2, pytest.param(10, marks=pytest.mark.long)])


@pytest.mark.long
@COUNTS
def test_survivors_need_no_more_memory_than_training(nemo_zygote: Zygote, tmp_path: Path, count: int) -> None:
    """The device has 4 % more than a step takes, in which nobody can build a model anew."""
    args = ("--bytes", str(int(13.7 * P)), "--steps", str(4 + 2 * count))
    faults = [f"exception@{('forward', 'backward')[at % 2]}:rank={at % 4},step={3 + 2 * at}" for at in range(count)]
    job = wide(nemo_zygote, tmp_path / "run", *faults, args=args)
    assert [incident.respawned for incident in job.incidents] == [()] * count
    cold = wide(nemo_zygote, tmp_path / "cold", faults[0], args=(*args, "--cold"), code=1)
    assert "out of memory" in cold.story()


@pytest.mark.long
def test_an_update_that_is_still_to_be_made_gives_way_to_a_model_that_is_built(
    nemo_zygote: Zygote, tmp_path: Path
) -> None:
    """The other ranks have made it, so that replicas fill the one that has not."""
    args = ("--bytes", str(15 * P), "--hooked", "--late", "0")
    job = wide(nemo_zygote, tmp_path / "run", "exception@forward:rank=3,step=5", args=args)
    assert [incident.respawned for incident in job.incidents] == [()] * 3, job.story()
    assert "beside a trainer that has an update to make" in job.log(0)


# ---- the device itself


def test_it_computes_what_gloo_does(nemo_zygote: Zygote, tmp_path: Path) -> None:
    found = nemo_zygote.run(3, "tests.ranks.test_device:collectives", {"run_dir": str(tmp_path)})
    for rank, each in enumerate(found):
        assert each == {
            "reduced": [3.0, 6.0],
            "most": [2.0, 3.0],
            "gathered": [0.0, 1.0, 1.0, 2.0, 2.0, 3.0],
            "scattered": [3.0 * value for value in ([0.0, 1.0], [1.0, 2.0], [2.0, 3.0])[rank]],
            "given": [1.0, 1.0],
            "exchanged": [rank, rank + 10.0, rank + 20.0],
            "objects": [0, 1, 2],
            "received": [(rank - 1) % 3],
        }


def test_it_has_the_properties_that_bite(nemo_zygote: Zygote, tmp_path: Path) -> None:
    found, _ = nemo_zygote.run(2, "tests.ranks.test_device:properties", {"run_dir": str(tmp_path)})
    launch_s, use_s = found.pop("launch_s"), found.pop("use_s")
    assert use_s > launch_s + 0.3, "a launch returns, and its result is waited for"
    error = "CUDA error: device-side assert triggered"
    assert found == {
        "sum": 2.0,
        "is_completed": True,
        "one abort alone ends": False,
        "aborts of all end": True,
        "an aborted sum": 1.0,
        "errors": [error] * 3,
    }


def _begin(run_dir: str) -> Any:
    os.environ["CHECKPOINTLESS_RUN_DIR"] = run_dir
    from tests.device import played

    played.install()
    dist.init_process_group(played.BACKEND)
    return played.device


def collectives(run_dir: str) -> dict[str, Any]:
    """Return the results of every collective and message, as gloo has them."""
    _begin(run_dir)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(2.0) + rank
    reduced, most = mine.clone(), mine.clone()
    dist.all_reduce(reduced)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    gathered = torch.empty(2 * size)
    dist.all_gather_into_tensor(gathered, mine)
    scattered = torch.empty(2)
    dist.reduce_scatter_tensor(scattered, gathered)
    given = torch.full((2,), float(rank))
    dist.broadcast(given, 1)
    exchanged = torch.empty(size)
    dist.all_to_all_single(exchanged, torch.arange(float(size)) + 10 * rank)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank)
    received = torch.empty(1)
    ring = [
        dist.P2POp(dist.isend, mine[:1].clone(), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    found = {
        "reduced": reduced.tolist(),
        "most": most.tolist(),
        "gathered": gathered.tolist(),
        "scattered": scattered.tolist(),
        "given": given.tolist(),
        "exchanged": exchanged.tolist(),
        "objects": objects,
        "received": received.tolist(),
    }
    torch.cuda.synchronize()
    return found


def properties(run_dir: str) -> dict[str, Any]:
    """Return what bites a recovery: rank 0 waits for rank 1, which comes late or never."""
    device = _begin(run_dir)
    pair, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    groups: list[Any] = [pair, other]
    for group in groups:
        dist.barrier(group)  # the communicators are made
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        began = time.monotonic()
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, group=pair, async_op=True)
        work.wait()
        found["launch_s"] = time.monotonic() - began
        found["sum"] = float(tensor.item())
        found["use_s"] = time.monotonic() - began
        found["is_completed"] = work.is_completed()
    else:
        time.sleep(3.0)
        dist.all_reduce(torch.ones(1), group=pair)
        torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 0:
        lost = [torch.ones(1) for _ in groups]
        for group, tensor in zip(groups, lost, strict=True):
            dist.all_reduce(tensor, group=group)
        first = threading.Thread(target=pair.abort)
        first.start()
        first.join(0.5)
        found["one abort alone ends"] = not first.is_alive()
        other.abort()
        first.join(30)
        found["aborts of all end"] = not first.is_alive()
        dist.barrier(pair)
        found["an aborted sum"] = float(lost[0].item())
        device.fail("device-side assert triggered")
        for what in (torch.cuda.synchronize, lost[0].item, lambda: dist.all_reduce(lost[0])):
            try:
                what()
            except RuntimeError as error:
                found.setdefault("errors", []).append(str(error))
    return found
