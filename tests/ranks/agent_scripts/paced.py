"""Train in torch's DDP with steps that take what is asked for: ``STEPS WAY``.

Ways: ``even``; ``uneven``: ranks 2 and 3 do other work, which takes four times as long; ``data``: rank 1 waits for
its batches; ``throttled``: rank 1 is stopped in each step until another process lets it go on; ``later``: rank 2
computes slowly in steps 30 to 59; ``moved``: rank 3 computes slowly in its first process, and before the last step
all wait until a node is to move.
"""

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining

STEPS, WAY = int(sys.argv[1]), sys.argv[2]
UNIT_S = 0.02
RANK = int(os.environ["RANK"])
LETS_GO_ON = 'while kill -CONT "$0"; do sleep 0.3; done'


def slows(step: int, generation: int) -> float:
    if WAY == "later" and RANK == 2 and 30 <= step < 60:
        return 10
    if WAY == "moved" and RANK == 3 and generation == 0:
        return 10
    return 4 if WAY == "uneven" and RANK >= 2 else 1


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])] if WAY == "uneven" else [None]
    group = pairs[RANK // 2 if WAY == "uneven" else 0]
    torch.manual_seed(1)
    part = torch.nn.Linear(8, 16 if WAY == "uneven" and RANK >= 2 else 8)
    model = DistributedDataParallel(part, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    same = dist.get_process_group_ranks(group) if group is not None else None
    training = PlainTraining(caller, [model], [optimizer], group=same)
    if WAY == "throttled" and RANK == 1:
        subprocess.Popen(["/bin/sh", "-c", LETS_GO_ON, str(os.getpid())])
    for step in training.steps(STEPS):
        if WAY == "data" and RANK == 1:
            time.sleep(10 * UNIT_S)
        loss = model(torch.randn(4, 8)).square().mean()
        time.sleep(slows(step, caller.generation) * UNIT_S)
        if WAY == "throttled" and RANK == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        loss.backward()
        deadline_s = time.monotonic() + 120
        while WAY == "moved" and step == STEPS and caller.generation == 0 and not caller.pause.is_wanted:
            assert time.monotonic() < deadline_s, "nobody moves a node"
            caller.beat()
            time.sleep(0.005)
        training.update(loss.item())
    dist.barrier()


main()
