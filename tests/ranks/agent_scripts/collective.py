"""Make steps with an all-reduce over gloo; rank 1 sleeps before its own in step 4 of generation 0."""

import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist
from block import RANK, note, run_block

MAIN = threading.main_thread().ident


def work(step: int, generation: int) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if (RANK, step, generation) == (1, 4, 0):
        time.sleep(60)
    total = torch.tensor([float(step)])
    dist.all_reduce(total)
    if total.item() != step * dist.get_world_size():
        raise AssertionError(f"step {step} met other ranks' step: {total.item()}")


def inquire() -> tuple[bool, str]:
    assert MAIN is not None
    stack = "".join(traceback.format_stack(sys._current_frames()[MAIN]))
    note("asked", in_collective="all_reduce(total)" in stack)
    return "all_reduce(total)" in stack, stack


def cleanup() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


run_block(8, work, inquire=inquire, cleanup=cleanup)
cleanup()
