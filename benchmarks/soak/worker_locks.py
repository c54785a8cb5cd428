"""How many data-loader workers die with a lock, if they are killed at work: `python worker_locks.py --kills 700`.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import threading
import time
from typing import Any

from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

LOCK_S = 0.5  # a living process has it for microseconds


class Numbers(Dataset[int]):
    """Costs a worker next to nothing, so that it is always between two of them."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        return index


def dies_with_the_lock(after_s: float) -> bool:
    """Kill a worker that works, and see whether the lock of the event that ends it can still be had."""
    batches = iter(DataLoader(Numbers(), batch_size=None, num_workers=1))
    assert isinstance(batches, _MultiProcessingDataLoaderIter)  # because of the worker
    signal_handling._remove_worker_pids(id(batches))  # torch would raise here when it dies
    batches._worker_pids_set = False
    done = threading.Event()

    def read() -> None:
        with contextlib.suppress(RuntimeError):
            while not done.is_set():
                next(batches)

    threading.Thread(target=read, daemon=True).start()
    time.sleep(after_s)
    (worker,) = batches._workers
    worker.terminate()
    done.set()
    worker.join()
    event: Any = batches._workers_done_event  # its lock is in no interface
    condition = event._cond
    lost = not condition.acquire(True, LOCK_S)
    condition.release()
    return lost


def main() -> None:
    """Run, and say how many."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--kills", type=int, default=700, metavar="N", help="default: 700")
    options.add_argument("--seed", type=int, default=0, metavar="K", help="of the moments; default: 0")
    args = options.parse_args()
    draws = random.Random(args.seed)
    lost = 0
    for number in range(1, args.kills + 1):
        lost += dies_with_the_lock(draws.uniform(0.02, 0.04))
        if number % 50 == 0:
            print(f"{number} killed, {lost} of them with the lock", flush=True)


if __name__ == "__main__":
    main()
