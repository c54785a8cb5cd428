"""Make steps with an all-reduce under ``@HPWrapper()``, in which ranks stall: ``STEPS [RANKS@WHERE:SECONDS ...]``.

``WHERE`` is the number of a step, ``import`` (before the block), ``set-up`` (before process groups) or ``start``
(after them, before the first step). Each happens in the first process of a rank and in generation 0 only. With
``silent:SECONDS`` in place of STEPS eight all-reduces come about so far apart, and nothing shows progress.
"""

import random
import sys
import time

import torch
import torch.distributed as dist
from block import INCARNATION, RANK, note

from checkpointless.inprocess import HPCallWrapper, HPWrapper

STEP_S = 0.1  # an agent that looks now and then has to see how long a step takes, to know what is long
STEPS, _, SILENT_S = sys.argv[1].partition(":")
STALLS = [argument.partition("@")[::2] for argument in sys.argv[2:]]


def stall(here: object, generation: int = 0) -> None:
    for ranks, what in STALLS:
        where, _, seconds = what.partition(":")
        if (where, generation, INCARNATION) == (str(here), 0, 0) and str(RANK) in ranks.split(","):
            note("stall", where=where)
            time.sleep(float(seconds))


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    note("go", generation=caller.generation, incarnation=INCARNATION)
    stall("set-up", caller.generation)
    dist.init_process_group("gloo")
    stall("start", caller.generation)
    draws = random.Random(RANK)
    for _ in range(8 if SILENT_S else 0):
        time.sleep(draws.random() * 2 * float(SILENT_S))
        dist.all_reduce(torch.ones(1))
    for step in range(max(caller.high_water, 0) + 1, 0 if SILENT_S else int(STEPS) + 1):
        caller.begin_step(step)
        time.sleep(STEP_S)
        stall(step, caller.generation)
        dist.all_reduce(torch.ones(1))
        caller.committed(step)
        caller.end_step()
        note("step", step=step, generation=caller.generation)
    dist.destroy_process_group()


stall("import")
main()
