"""Train in one of several layouts, and do in the block what a process can do only once: ``STEPS LAYOUT [ONCE]``.

LAYOUT: ddp, hsdp (two replicas) or sharded. ONCE: spawn (``set_start_method``), registry (which refuses a second
entry), always (which fails in every process but the first), or process (nothing, but
``HPWrapper(restart="process")``). Rank 1's successor finds its state ``damaged``, rank 1 finds no place for its
state (``full``), or successors ``wait`` before the block. With ``waits`` step 3 lasts until a node is to move.
"""

import multiprocessing
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining
from checkpointless.system.environment import HANDOVER_ENV, INCARNATION_ENV

STEPS, LAYOUT, ONCE = int(sys.argv[1]), sys.argv[2], (*sys.argv, "")[3]
WIDTH = 40
RANK, IS_NEW = int(os.environ["RANK"]), os.environ[INCARNATION_ENV] != "0"
HANDED_OVER = Path(os.environ[HANDOVER_ENV]) / f"rank-{RANK}"
names: set[str] = set()

print(f"hands over in {HANDED_OVER.parent}", flush=True)
if IS_NEW and HANDED_OVER.is_dir():
    (part,) = HANDED_OVER.iterdir()
    print(f"found {part.stat().st_mode & 0o777:o} in {HANDED_OVER.stat().st_mode & 0o777:o}", flush=True)
    if RANK == 1 and "damaged" in sys.argv:
        with open(part, "r+b") as file:
            file.seek(part.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    if "wait" in sys.argv:
        time.sleep(100)


def register(name: str) -> None:
    if name in names:
        raise ValueError(f"{name} is already registered")
    names.add(name)


def do_once() -> None:
    if ONCE == "spawn":
        multiprocessing.set_start_method("spawn")
    elif ONCE == "registry":
        register("model")
    elif ONCE == "always" and (IS_NEW or names):
        raise ValueError("this never ends well again")
    names.add("model")


def build() -> Any:
    first, last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
    model = torch.nn.Sequential(first, torch.nn.Dropout(0.1), torch.nn.BatchNorm1d(WIDTH), last)
    if LAYOUT == "ddp":
        return DistributedDataParallel(model)
    world = dist.get_world_size()
    shape = (2, world // 2) if LAYOUT == "hsdp" else (1, world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


@HPWrapper(restart="process" if ONCE == "process" else "in-process")
def main(caller: HPCallWrapper) -> None:
    do_once()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    torch.manual_seed(100 + RANK)
    np.random.seed(RANK)
    random.seed(RANK)
    norms: list[float] = []
    training = PlainTraining(caller, [model], [optimizer], schedulers=[scheduler], state={"norms": norms})
    if RANK == 1 and "full" in sys.argv:
        HANDED_OVER.touch()  # a file, in which no file can be
    for step in training.steps(STEPS):
        caller.enter_phase("data", step)
        x = torch.randn(8, WIDTH)
        caller.enter_phase("forward", step)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        caller.enter_phase("backward", step)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), sum(norms[-3:]) + 1)))
        deadline_s = time.monotonic() + 120
        while "waits" in sys.argv and step == 3 and caller.generation == 0 and not caller.pause.is_wanted:
            assert time.monotonic() < deadline_s, "nobody moves a node"
            caller.beat()
            time.sleep(0.005)
        training.update(loss.item())
    dist.barrier()


main()
