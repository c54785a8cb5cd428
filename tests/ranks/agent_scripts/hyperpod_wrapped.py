"""Make the all-reduces of ``wrapped.py`` as a rank of the stand-in for SageMaker HyperPod's agent.

In step 3 of each generation rank 1 does what the next argument says: ``raise``, ``die``, or ``wait`` for the test.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from checkpointless.inprocess import HPCallWrapper, HPWrapper
from checkpointless.launcher.client import wait_rank
from tests import hyperpod_stand_in

hyperpod_stand_in.install()


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    for step in range(1, 6):
        caller.begin_step(step)
        if rank == 1 and step == 3 and (what := sys.argv[1:][caller.generation :]):
            if what[0] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            while what[0] == "wait":
                time.sleep(0.01)
            raise ValueError("the loss is not a number")
        total = torch.tensor([float(step)])
        dist.all_reduce(total)
        assert total.item() == step * dist.get_world_size()
        caller.end_step()
    dist.destroy_process_group()
    print(f"rank {rank} done in generation {caller.generation} of {caller.incident}", flush=True)
    print(f"high water {caller.high_water} pid {os.getpid()}", flush=True)


wait_rank()
print(f"rank {os.environ['RANK']} begins pid {os.getpid()}", flush=True)
main()
