"""Train a transformer with DDP in a loop of one's own, under ``checkpointless run`` or, to compare, under torchrun.

Under torchrun (``--checkpoint FILE``) a checkpoint is written after each step, and ``--fault KIND:STEP`` raises or
kills rank 2 once. Rank 0 prints when each step has ended, and rank 2 when it fails, in seconds since the epoch.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkpointless import HPWrapper, PlainTraining

#: Width, layers, heads, length, batch, vocabulary; with the first, 150 million parameters.
SIZES = {"large": (1024, 10, 16, 256, 4, 8192), "small": (32, 2, 2, 16, 4, 64)}
FAILS = 2  # the rank


class Model(nn.Module):
    """Represents a language model."""

    def __init__(self, width: int, layers: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens) + self.position))


def options() -> argparse.Namespace:
    made = argparse.ArgumentParser()
    made.add_argument("--steps", type=int, default=12)
    made.add_argument("--size", choices=tuple(SIZES), default="small")
    made.add_argument("--checkpoint", type=Path)
    made.add_argument("--fault", action="append", default=[])
    return made.parse_args()


def backward(model: nn.Module, args: argparse.Namespace, step: int) -> torch.Tensor:
    """Return the loss of a step's batch, whose gradients are there."""
    _, _, _, length, batch, vocabulary = SIZES[args.size]
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(vocabulary, (batch, length), generator=generator).to(device())
    with torch.autocast(device(), torch.bfloat16):
        scores = model(tokens)
    loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
    loss.backward()
    return loss


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def said(what: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(f"{what} {time.time():.4f}", flush=True)


def begin(args: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(1)
    width, layers, heads, length, _, vocabulary = SIZES[args.size]
    model = DistributedDataParallel(Model(width, layers, heads, length, vocabulary).to(device()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(100 + dist.get_rank())
    return model, optimizer


@HPWrapper(abort_timeout=20.0)
def recoverable() -> None:
    args = options()
    model, optimizer = begin(args)
    training = PlainTraining(modules=[model], optimizers=[optimizer])
    for step in training.steps(args.steps):
        training.update(backward(model, args, step).item())
        if dist.get_rank() == 0:
            said(f"STEP {step}")
    dist.barrier()


def with_checkpoints() -> None:
    """Train from the newest checkpoint on, and write one after each step."""
    args = options()
    model, optimizer = begin(args)
    for step in remaining(args, model, optimizer):
        fail(args, step)
        backward(model, args, step)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            new = args.checkpoint.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new)
            os.replace(new, args.checkpoint)
            said(f"STEP {step}")
        dist.barrier()


def remaining(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[int]:
    """Return the steps that the newest checkpoint leaves, after loading it."""
    if not args.checkpoint.exists():
        return range(1, args.steps + 1)
    found: dict[str, Any] = torch.load(args.checkpoint, map_location=device())
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return range(found["step"] + 1, args.steps + 1)


def fail(args: argparse.Namespace, step: int) -> None:
    """Raise or die if that was asked for, once for each of the faults."""
    for kind, at in (each.split(":") for each in args.fault):
        done = args.checkpoint.with_suffix(f".{kind}")
        if int(at) == step and dist.get_rank() == FAILS and not done.exists():
            done.touch()
            said(f"FAULT {kind}")
            if kind == "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a fault on purpose")


if __name__ == "__main__":
    with_checkpoints() if options().checkpoint else recoverable()
