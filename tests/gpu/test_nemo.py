"""Test NeMo's strategy over NCCL on one GPU, with the wheels of ``make gpu-kit WITH=nemo``.

Without a GPU it trains over gloo, if ``CHECKPOINTLESS_GPU_ON_CPU`` is set.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.gpu import jobs
from tests.gpu.isolated import Record
from tests.gpu.jobs import Undisturbed
from tests.gpu.test_jobs import CUDA, STEPS, Layout, check
from tests.gpu.test_jobs import pytestmark as needs_gpu

NEMO = importlib.util.find_spec("nemo") is not None
pytestmark = [*needs_gpu, pytest.mark.nemo, pytest.mark.skipif(not NEMO, reason="needs NeMo: gpu-kit WITH=nemo")]

LIMIT_S = 240.0 if CUDA else 400.0
LAYOUT = Layout(jobs.NEMO, (str(STEPS),), nodes=4 if CUDA else 1, cpu=True)  # Lightning gives each rank a GPU
#: With the ranks whose processes are replaced.
FAULTS: dict[str, tuple[int, ...]] = {
    "exception@backward:rank=2,step=3": (),
    "sigkill@before_optimizer:rank=1,step=5": (1,),
    "hang@before_optimizer:rank=3,step=7": (3,),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp, LIMIT_S)


def test_nemo_through_an_exception_a_kill_and_a_hang(
    tmp_path: Path, undisturbed: Undisturbed, record_property: Record
) -> None:
    record_property("torch, device", f"{torch.__version__}, {torch.cuda.get_device_name() if CUDA else 'CPU'}")
    check(tmp_path / "run", undisturbed, record_property, LAYOUT, FAULTS, LIMIT_S)


def test_two_runs_with_nemo_are_equal(tmp_path: Path, undisturbed: Undisturbed, record_property: Record) -> None:
    check(tmp_path / "run", undisturbed, record_property, LAYOUT, {}, LIMIT_S)
