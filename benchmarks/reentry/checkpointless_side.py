"""One rank under `checkpointless run`: `checkpointless_side.py DIRECTORY FAULT PEERS`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist

from checkpointless.inprocess import HPCallWrapper, HPWrapper

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Marks
from benchmarks.reentry.block import Fault, Peers, block


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    """The block, with everything as it is by default."""
    directory, fault, peers = sys.argv[1:]
    marks = Marks(Path(directory), int(os.environ["RANK"]))
    block(lambda: dist.init_process_group("gloo"), caller.generation, marks, Fault(fault), Peers(peers))


if __name__ == "__main__":
    main()
