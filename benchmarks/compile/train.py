"""One rank of a compiled training: `train.py DIRECTORY STEPS WHAT BACKEND`; see README.md beside this file."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Marks
from checkpointless import HPCallWrapper, HPWrapper, PlainTraining

WIDTH, BATCH, BLOCKS = 64, 8, 4


class Block(torch.nn.Module):
    """What is repeated in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows after this block."""
        out: torch.Tensor = rows + self.dropout(self.inner(self.norm(rows)))
        return out


def compiled(what: str, backend: str) -> torch.nn.Module:
    """Make the model, and compile what is asked for: "nothing", "blocks" or "model" (with DDP around it)."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))
    if what == "blocks":
        for block in model:
            block.compile(backend=backend)
    wrapped = DistributedDataParallel(model)
    if what == "model":
        wrapped.compile(backend=backend)
    return wrapped


@HPWrapper()
def main(call: HPCallWrapper) -> None:
    """Train, and write down what each step took and how much was compiled until then."""
    directory, steps, what, backend = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    marks = Marks(Path(directory), dist.get_rank())
    model = compiled(what, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training = PlainTraining(modules=[model], optimizers=[optimizer])
    for step in training.steps(int(steps)):
        began_s = time.monotonic()
        rows = torch.randn(BATCH, WIDTH)
        call.enter_phase("forward", step)
        loss = (model(rows) - rows.roll(-1, 1)).square().mean()
        call.enter_phase("backward", step)
        loss.backward()
        training.update(loss.item())
        graphs = counters["stats"]["unique_graphs"]
        fallen = sum(counters["recompile_limit"].values()) if "recompile_limit" in counters else 0
        took_s = time.monotonic() - began_s
        marks.write("step", step=step, generation=call.generation, took_s=took_s, graphs=graphs, fallen=fallen)


if __name__ == "__main__":
    main()
