"""Test whole jobs of four ranks on one GPU: faults change no bit, and only ranks with a deadly one are replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.jobs import LOOP, MEGATRON_LOOP, Finished, Undisturbed, check_equal, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(180),
]

STEPS = 6
FP32 = ("--steps", str(STEPS), "--device", "cuda")
BF16 = (*FP32, "--dtype", "bf16")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp)


def note(record: Callable[[str, object], None], job: Finished) -> None:
    for number, incident in enumerate(job.incidents, 1):
        record(f"incident {number}, seconds", incident.headline_s)


@pytest.mark.parametrize(
    ("args", "faults", "replaced"),
    [
        (FP32, ("exception@backward:rank=2,step=3", "sigkill@before_optimizer:rank=1,step=5"), [(), (1,)]),
        (BF16, ("segfault@optimizer:rank=3,step=3", "exception@sync:rank=0,step=5"), [(3,), ()]),
        (BF16, ("cuda@forward:rank=1,step=3", "oom@backward:rank=2,step=5"), [(1,), ()]),
        (BF16, ("sigkill@backward:rank=1,step=4", "exception@recovery:rank=2,step=3"), [(1,), ()]),
        (BF16, ("hang@forward:rank=1,step=4",), [(1,)]),
    ],
    ids=["exception-and-kill", "in-the-update", "device-assert-and-memory", "twice", "hang"],
)
def test_a_plain_loop(
    tmp_path: Path,
    undisturbed: Undisturbed,
    record_property: Callable[[str, object], None],
    args: tuple[str, ...],
    faults: tuple[str, ...],
    replaced: list[tuple[int, ...]],
) -> None:
    without = undisturbed(LOOP, *args)
    job = run(tmp_path / "run", LOOP, *args, faults=faults)
    check_equal(without, job, faults, STEPS)
    note(record_property, job)
    assert [incident.respawned for incident in job.incidents] == replaced, job.story()


@pytest.mark.parametrize(
    ("tensor_parallel", "faults", "replaced"),
    [
        ("1", ("exception@backward:rank=1,step=2", "sigkill@optimizer:rank=3,step=4"), [(), (3,)]),
        ("2", ("sigkill@optimizer:rank=0,step=3", "cuda@forward:rank=3,step=5"), [(0,), (3,)]),
    ],
    ids=["data", "tensors"],
)
def test_megatron_core_without_nemo(
    tmp_path: Path,
    undisturbed: Undisturbed,
    record_property: Callable[[str, object], None],
    tensor_parallel: str,
    faults: tuple[str, ...],
    replaced: list[tuple[int, ...]],
) -> None:
    pytest.importorskip("megatron.core", reason="needs Megatron-core")
    args = ("cuda", str(STEPS), tensor_parallel)
    without = undisturbed(MEGATRON_LOOP, *args)
    job = run(tmp_path / "run", MEGATRON_LOOP, *args, faults=faults)
    check_equal(without, job, faults, STEPS)
    note(record_property, job)
    assert [incident.respawned for incident in job.incidents] == replaced, job.story()
