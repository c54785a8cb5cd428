"""Make all-reduces under ``@HPWrapper()`` and any launcher; words say what rank 1 does in step 3 of a generation.

``raise`` (the only one if there are no words), ``die``, ``wait`` for the test, ``always`` (raise, then and in each
later one) or ``replace`` (raise, and be unfit). With ``hyperpod`` before them ranks are those of the stand-in for
SageMaker HyperPod's agent.
"""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from checkpointless.inprocess import HPCallWrapper, HPWrapper
from checkpointless.launcher.client import wait_rank

WORDS = sys.argv[1:] or ["raise"]
if WORDS[0] == "hyperpod":
    from tests import hyperpod_stand_in

    hyperpod_stand_in.install()
    wait_rank()
    del WORDS[0]
RANK = int(os.environ["RANK"])


def fail(caller: HPCallWrapper) -> None:
    what = "always" if "always" in WORDS else "".join(WORDS[caller.generation :][:1])
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while what == "wait":
        time.sleep(0.01)
    if what == "replace":
        caller.restart_in_process = False
    if what:
        raise ValueError("the loss is not a number")


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    for step in range(1, 6):
        caller.begin_step(step)
        if RANK == 1 and step == 3:
            fail(caller)
        total = torch.tensor([float(step)])
        dist.all_reduce(total)
        assert total.item() == step * dist.get_world_size()
        caller.end_step()
    dist.destroy_process_group()
    print(f"rank {RANK} done in generation {caller.generation} of {caller.incident} pid {os.getpid()}", flush=True)
    print(f"high water {caller.high_water} pid {os.getpid()}", flush=True)


print(f"rank {RANK} begins pid {os.getpid()}", flush=True)
main()
print(f"rank {RANK} ends with {threading.active_count()} threads", flush=True)
