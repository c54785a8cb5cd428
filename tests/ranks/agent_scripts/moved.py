"""Train while a node moves: ``STEPS LAYOUT [waits]``; with ``waits``, step 3 lasts until the move begins."""

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining

STEPS, LAYOUT = int(sys.argv[1]), sys.argv[2]
WAITS = "waits" in sys.argv
WIDTH = 38


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for _ in range(2):
        layers += [
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.GELU(),
            torch.nn.BatchNorm1d(WIDTH),
            torch.nn.Dropout(0.1),
        ]
    made: Any = torch.nn.Sequential(*layers)
    if LAYOUT == "ddp":
        return DistributedDataParallel(made)
    shape = (2, dist.get_world_size() // 2) if LAYOUT == "hsdp" else (1, dist.get_world_size())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return fully_shard(made, mesh=mesh)


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    torch.manual_seed(100 + dist.get_rank())
    training = PlainTraining(caller, [net], [optimizer], schedulers=[scheduler])
    for step in training.steps(STEPS):
        caller.enter_phase("data", step)
        x = torch.randn(8, WIDTH)
        caller.enter_phase("forward", step)
        loss = (net(x) - x.roll(1, 1)).square().mean()
        caller.enter_phase("backward", step)
        loss.backward()
        deadline_s = time.monotonic() + 120
        while WAITS and step == 3 and caller.generation == 0 and not caller.pause.is_wanted:
            assert time.monotonic() < deadline_s, "nobody moves a node"
            caller.beat()
            time.sleep(0.005)
        training.update(loss.item())


main()
print(f"rank {os.environ['RANK']} is done", flush=True)
