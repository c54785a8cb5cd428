"""Compute digests with the kernel in Triton's interpreter, which a process must choose before it imports Triton."""

from __future__ import annotations

import json
import sys

import torch

from checkpointless.state.serialization.digest import launch, load_kernel, unsigned


def main() -> None:
    """Read cases as JSON, lists of the bytes, their offset, block and chunk; write their digests."""
    kernel = load_kernel()
    found = []
    for values, offset, block, chunk in json.load(sys.stdin):
        flat = torch.tensor(values, dtype=torch.uint8)[offset:]
        found.append(unsigned(int(launch(kernel, flat, chunk, block).item())))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
