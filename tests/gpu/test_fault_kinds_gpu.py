"""Test the kinds of fault that need a GPU: what torch reports, and that the process is found unfit or goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpointless.faults.inject import FaultInjector
from checkpointless.faults.ledger import FaultLedger, fired
from checkpointless.faults.spec import FaultPhase, parse

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

_RANK = """
import torch; torch.zeros(1, device="cuda")
from checkpointless.faults.inject import FaultInjector
from checkpointless.faults.spec import FaultPhase
from checkpointless.inprocess import CudaHealthCheck, HPState

state = HPState(rank=0, world_size=1, local_rank=0, generation=0)
CudaHealthCheck()(state)
try:
    FaultInjector.from_environment(0).at(FaultPhase.FORWARD, 2, 0)
except RuntimeError as error:
    print(error)
CudaHealthCheck()(state)
"""


def test_after_a_device_assert_the_process_is_found_unfit(tmp_path: Path) -> None:
    spec = "cuda@forward:rank=0,step=2"
    ours = {"CHECKPOINTLESS_RUN_DIR": str(tmp_path), "CHECKPOINTLESS_FAULTS": json.dumps([spec])}
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", **ours}
    rank = subprocess.run(
        [sys.executable, "-c", _RANK], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "device-side assert" in rank.stdout
    assert rank.returncode == 1
    assert "is not healthy" in rank.stderr
    assert fired(tmp_path) == {spec: 1}


def test_gpu_memory_that_runs_out_is_free_afterwards(tmp_path: Path) -> None:
    held = torch.ones(1024, device="cuda")
    before, stream = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    injector = FaultInjector([parse("oom@backward:rank=0,step=1")], 0, FaultLedger(tmp_path))
    with pytest.raises(torch.OutOfMemoryError):
        injector.at(FaultPhase.BACKWARD, 1, 0)
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(torch.cuda.get_rng_state(), stream)
    assert held.sum().item() == 1024.0
