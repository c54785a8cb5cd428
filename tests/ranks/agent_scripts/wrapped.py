"""Make all-reduces under ``@HPWrapper()`` and any launcher; rank 1 raises in step 3 of generation 0, or of each."""

import os
import sys
import threading

import torch
import torch.distributed as dist

from checkpointless.inprocess import HPCallWrapper, HPWrapper

RANK = int(os.environ["RANK"])


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    for step in range(1, 6):
        caller.begin_step(step)
        if RANK == 1 and step == 3 and (caller.generation == 0 or "always" in sys.argv):
            if "replace" in sys.argv:
                caller.restart_in_process = False
            raise ValueError("the loss is not a number")
        total = torch.tensor([float(step)])
        dist.all_reduce(total)
        assert total.item() == step * dist.get_world_size()
        caller.end_step()
    dist.destroy_process_group()
    print(f"rank {RANK} done in generation {caller.generation} pid {os.getpid()}", flush=True)


print(f"rank {RANK} begins pid {os.getpid()}", flush=True)
main()
print(f"rank {RANK} ends with {threading.active_count()} threads", flush=True)
