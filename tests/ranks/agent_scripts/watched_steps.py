"""Make all-reduces under ``@HPWrapper()`` until the file ``end`` is in the folder that is the argument.

Rank 1 fails in generation 0 as soon as the file ``fault`` is there, in the way that it names. What the ranks do is
noted in that folder, so that nothing here but our own code needs the disk of the run directory.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from checkpointless.inprocess import HPCallWrapper, HPWrapper

RANK, HERE = int(os.environ["RANK"]), Path(sys.argv[1])


def note(**fields: object) -> None:
    with (HERE / f"notes-{RANK}.jsonl").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "at_s": time.monotonic(), **fields}) + "\n")


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    step = max(caller.high_water, 0)
    while True:
        step += 1
        caller.begin_step(step)
        fault = HERE / "fault"
        if RANK == 1 and caller.generation == 0 and fault.exists():
            if fault.read_text() == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the loss is not a number")
        is_over = torch.tensor([float(RANK == 0 and (HERE / "end").exists())])
        dist.all_reduce(is_over)
        time.sleep(0.05)
        caller.committed(step)
        caller.end_step()
        note(generation=caller.generation, step=step)
        if is_over.item():
            break
    dist.destroy_process_group()


main()
