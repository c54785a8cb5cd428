"""Make eight all-reduces, about ``SECONDS`` apart, in a block under ``@HPWrapper()`` that never shows progress."""

import random
import sys
import time

import torch
import torch.distributed as dist
from block import INCARNATION, RANK, note

from checkpointless.inprocess import HPCallWrapper, HPWrapper


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    note("go", generation=caller.generation, incarnation=INCARNATION)
    draws = random.Random(RANK)
    dist.init_process_group("gloo")
    for _ in range(8):
        time.sleep(draws.random() * 2 * float(sys.argv[1]))
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


main()
