"""Test whole jobs of four ranks over NCCL on one GPU: faults change no bit, and cost less than under torchrun.

Each layout is trained once without faults and once with all of them. Without a GPU they run over gloo, if
``CHECKPOINTLESS_GPU_ON_CPU`` is set, which shows that the suite itself works.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import jobs
from tests.gpu.isolated import ROOT, Record
from tests.gpu.jobs import Undisturbed, check_equal
from tests.gpu.nccl import SHARED, SHARED_SINCE
from tests.gpu.run import ON_CPU
from tests.gpu.test_nccl import VERSION

CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA and ON_CPU not in os.environ, reason="needs CUDA"),
    pytest.mark.skipif(CUDA and VERSION < SHARED_SINCE, reason=f"NCCL {VERSION} lets no two ranks share a GPU"),
]

STEPS = 12
SIZE = "large" if CUDA else "small"
LIMIT_S = 150.0 if CUDA else 280.0
#: By kind, with the ranks whose processes are replaced. The third comes while communicators are made again.
FAULTS: dict[str, tuple[int, ...]] = {
    "exception@optimizer:rank=2,step=3": (),
    "sigkill@before_optimizer:rank=1,step=5": (1,),
    "exception@recovery:rank=2,step=4": (),
    "oom@before_optimizer:rank=0,step=7": (),
    "hang@before_optimizer:rank=1,step=9": (1,),
    "cuda@before_optimizer:rank=3,step=11": (3,),
}


@dataclass(frozen=True)
class Layout:
    script: Path
    args: tuple[str, ...]
    nodes: int = 1
    cpu: bool = False


LAYOUTS = {
    "ddp": Layout(jobs.DDP, ("--steps", str(STEPS), "--size", SIZE)),
    "megatron": Layout(jobs.MEGATRON, ("--steps", str(STEPS)), cpu=True),
    "hsdp": Layout(jobs.HSDP, ("--steps", str(STEPS)), nodes=4),
    "megatron-tensors": Layout(jobs.MEGATRON_LAYOUTS, (str(STEPS), "tp=2", "bf16=1"), cpu=True),
    "lightning": Layout(jobs.LIGHTNING, (str(STEPS),), nodes=4),
    "megatron-pipelines": Layout(jobs.MEGATRON_LAYOUTS, (str(STEPS), "pp=2", "bf16=1"), cpu=True),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp, LIMIT_S)


def calm(undisturbed: Undisturbed, layout: Layout) -> jobs.Job:
    return undisturbed(layout.script, *layout.args, nodes=layout.nodes, cpu=layout.cpu and not CUDA)


def check_layout(run_dir: Path, undisturbed: Undisturbed, record: Record, name: str, *left_out: str) -> None:
    """Train a layout through all faults but those kinds, and check that no bit is another one."""
    if name.startswith("megatron"):
        pytest.importorskip("megatron.core", reason="needs Megatron-core")
    skipped = {*left_out} if CUDA else {*left_out, "cuda"}
    faults = {spec: replaced for spec, replaced in FAULTS.items() if spec.partition("@")[0] not in skipped}
    check(run_dir, undisturbed, record, LAYOUTS[name], faults)


def check(
    run_dir: Path,
    undisturbed: Undisturbed,
    record: Record,
    layout: Layout,
    faults: dict[str, tuple[int, ...]],
    limit_s: float = LIMIT_S,
) -> None:
    """Train a layout through faults, and check that no bit is another one, and whose processes were replaced."""
    without, cpu = calm(undisturbed, layout), layout.cpu and not CUDA
    settings: Any = {"nodes": layout.nodes, "faults": tuple(faults), "limit_s": limit_s, "cpu": cpu}
    job = jobs.run(run_dir, layout.script, *layout.args, **settings)
    for spec, incident in zip(faults, job.incidents, strict=False):
        kind = spec.partition(":")[0]
        record(f"{kind}, s", incident.headline_s)
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in incident.tiles_s.items())
        record(f"{kind} by stage", f"({stages})")
    check_equal(without, job, tuple(faults), STEPS)
    assert [incident.respawned for incident in job.incidents] == list(faults.values()), job.story()


def test_ddp_through_every_fault(tmp_path: Path, undisturbed: Undisturbed, record_property: Record) -> None:
    check_layout(tmp_path / "run", undisturbed, record_property, "ddp")


@pytest.mark.skipif(
    not CUDA and ON_CPU in os.environ, reason="after torchrun's restart the ranks did not connect over gloo (2.13)"
)
def test_the_same_loop_under_torchrun_takes_longer(tmp_path: Path, record_property: Record) -> None:
    """There is no limit: what the faults cost with checkpoints and restarts is noted, beside a step's time."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    words += ["--max-restarts", "2", str(jobs.DDP), *LAYOUTS["ddp"].args]
    words += ["--checkpoint", str(tmp_path / "checkpoint"), "--fault", "exception:5", "--fault", "sigkill:8"]
    env = {**os.environ, **jobs.SETTINGS, **SHARED, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [(what, float(at)) for what, at in re.findall(r"^(STEP \d+|FAULT \w+) ([\d.]+)$", done.stdout, re.M)]
    ends = {what: at for what, at in said if what.startswith("STEP")}
    assert list(ends) == [f"STEP {step}" for step in range(1, STEPS + 1)]
    record_property("a step, s", ends["STEP 4"] - ends["STEP 3"])
    for kind, step in (("exception", 5), ("sigkill", 8)):
        record_property(f"{kind} under torchrun, s", ends[f"STEP {step}"] - dict(said)[f"FAULT {kind}"])


def test_two_runs_of_the_megatron_example_are_equal(tmp_path: Path, undisturbed: Undisturbed) -> None:
    pytest.importorskip("megatron.core", reason="needs Megatron-core")
    layout = LAYOUTS["megatron"]
    again = jobs.run(tmp_path / "run", layout.script, *layout.args, limit_s=LIMIT_S, cpu=not CUDA)
    check_equal(calm(undisturbed, layout), again, (), STEPS)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "ddp"])
def test_another_layout_through_faults(
    tmp_path: Path, undisturbed: Undisturbed, record_property: Record, name: str
) -> None:
    """No layout differs in how a hang is noticed, which takes longest."""
    check_layout(tmp_path / "run", undisturbed, record_property, name, "hang")
