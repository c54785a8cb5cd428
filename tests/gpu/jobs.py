"""Run whole jobs of the suite under an agent, and compare their steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpointless.faults.ledger import fired
from tests.gpu.isolated import ROOT
from tests.gpu.nccl import SHARED
from tests.ports import free_port
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.agent_job import Job as AgentJob
from tests.ranks.jobs import TOKEN, Job

LOOP = ROOT / "tests" / "gpu" / "loop.py"
DDP = ROOT / "tests" / "gpu" / "ddp.py"
LIGHTNING = ROOT / "tests" / "gpu" / "lightning_ddp.py"
NEMO = ROOT / "tests" / "gpu" / "nemo_gpt.py"
HSDP = ROOT / "examples" / "train_hsdp.py"
MEGATRON = ROOT / "examples" / "train_megatron.py"
MEGATRON_LAYOUTS = SCRIPTS / "megatron_loop.py"
#: For equal bits, and for tensor parallelism without a warning.
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def run(
    run_dir: Path,
    script: Path,
    *args: str,
    ranks: int = 4,
    nodes: int = 1,  # agents; each rank of a node uses another GPU unless the script says which
    faults: tuple[str, ...] = (),
    limit_s: float = 120.0,
    cpu: bool = False,
) -> Job:
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    common: dict[str, Any] = {
        "nproc": ranks // nodes,
        "faults": faults,
        "record_steps": True,
        "heartbeat_timeout_s": 15.0,
        "stream_logs": False,
        "cpu": cpu,
        "env": {"PYTHONPATH": os.pathsep.join([*before, str(ROOT)])},
        "extra_env": {**SETTINGS, **SHARED},
    }
    if nodes > 1:
        common |= {"nnodes": nodes, "rdzv_endpoint": f"127.0.0.1:{free_port()}", "token": TOKEN}
    places: list[dict[str, Any]] = [{"node_rank": node} for node in range(nodes)] if nodes > 1 else [{}]
    jobs = [AgentJob(run_dir, str(script), *args, **common, **place) for place in places]
    ended = [job.end(limit_s, code=None) for job in jobs]
    return Job(max(each.code for each in ended), tuple(each.out + each.err for each in ended), run_dir)


def check_equal(undisturbed: Job, disturbed: Job, faults: tuple[str, ...], steps: int) -> None:
    """Check that every fault happened and changed no bit."""
    assert disturbed.code == 0, disturbed.story()
    assert fired(disturbed.run_dir) == dict.fromkeys(faults, 1)
    disturbed.assert_same(undisturbed.steps, steps)


class Undisturbed:
    """Runs each kind of job once without faults."""

    def __init__(self, folder: Callable[[str], Path], limit_s: float = 120.0) -> None:
        self._folder, self._limit_s = folder, limit_s
        self._known: dict[tuple[Path, tuple[str, ...], int, int], Job] = {}

    def __call__(self, script: Path, *args: str, ranks: int = 4, nodes: int = 1, cpu: bool = False) -> Job:
        key = script, args, ranks, nodes
        if key not in self._known:
            run_dir = self._folder("undisturbed") / "run"
            job = run(run_dir, script, *args, ranks=ranks, nodes=nodes, cpu=cpu, limit_s=self._limit_s)
            assert job.code == 0, job.story()
            assert job.incidents == []
            self._known[key] = job
        return self._known[key]
