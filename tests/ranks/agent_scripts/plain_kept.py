"""Train a model in DDP that is kept built, and do what the words say: ``STEPS [WORD ...]``.

``anew``: build it each time. ``counts``, ``collects``: the model has an attribute that each forward pass changes.
``hook``: the loop adds a hook behind ``keep``. ``writes``: weights are set behind ``keep`` each time, and by
``overwrites`` on rank 1 after the first fault only. ``refers``: an old wrapper stays alive. ``communicates``:
``build`` does. ``wraps``: it wraps the model. ``scheduler``: it returns a scheduler. ``scratch``: the job may start
over, and ``overwrites`` is about all ranks. ``quietly``: torch does not count what is written.
``freezes``: a layer is frozen from step 3 on. ``two``: there are two calls of ``keep``. ``accumulates``: a hook
hangs where a gradient is accumulated. ``broadcasts``: the loop gives all ranks the first one's weights. ``loads``:
it loads the newest checkpoint, of which there is none at the start. ``varies``: an argument of ``build`` does, from
entry to entry. ``locked``: an argument cannot be compared.
"""

import functools
import gc
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkpointless import CheckpointManager, HPCallWrapper, HPWrapper, PlainTraining, keep

STEPS, WORDS = int(sys.argv[1]), set(sys.argv[2:])
WIDTH = 64
MANAGER = CheckpointManager(allow_restart_from_scratch="scratch" in WORDS)
CHECKPOINT = Path(os.environ["CHECKPOINTLESS_RUN_DIR"], "checkpoint.pt")
wrappers: list[DistributedDataParallel] = []
accumulation: list[Any] = []
accumulated: list[int] = []
calls = 0


class Model(torch.nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.activation = functools.partial(torch.nn.functional.gelu, approximate="tanh")
        self.drop = torch.nn.Dropout(0.1)
        self.norm = torch.nn.BatchNorm1d(4 * WIDTH)
        self.last = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.seen: list[int] = []
        self.calls = 0
        self.to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "counts" in WORDS:
            self.calls += 1
        if "collects" in WORDS:
            self.seen.append(len(x))
        return self.last(self.norm(self.drop(self.activation(self.first(x)))))


def build(device: torch.device, *_: object) -> Any:
    global calls
    calls += 1
    model: Any = Model(device)
    torch.nn.init.normal_(model.last.weight, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    if "communicates" in WORDS:
        dist.broadcast(model.first.weight.data, 0)
    if "wraps" in WORDS:
        model = DistributedDataParallel(model, init_sync=False)
    if "scheduler" in WORDS:
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizers": [optimizer]}


def build_more() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(WIDTH, WIDTH)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Both(torch.nn.Module):
    def __init__(self, first: torch.nn.Module, second: torch.nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def tensor_bytes() -> int:
    """The bytes of all tensors that Python knows, each storage once."""
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@HPWrapper(checkpoint_manager=MANAGER)
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    device = torch.device("cpu")
    more = [caller.generation] if "varies" in WORDS else [threading.Lock()] if "locked" in WORDS else []
    built = keep(functools.partial(lambda *more: build(device, *more), *more), warm="anew" not in WORDS)
    inner, (optimizer,) = built["model"], built.pop("optimizers")
    extra, *others = keep(build_more) if "two" in WORDS else (torch.nn.Identity(),)
    wrapped, inner = (inner, inner.module) if "wraps" in WORDS else (None, inner)
    assert all(each.grad is None for each in inner.parameters())
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert "initial_lr" not in optimizer.param_groups[0]
    assert inner.training
    assert inner.last.weight.requires_grad
    dist.barrier()  # all have what was kept for them when one meets its fault
    caller.enter_phase("init", caller.high_water)
    is_overwritten = "overwrites" in WORDS and (dist.get_rank() == 1 or "scratch" in WORDS)
    if "writes" in WORDS or (is_overwritten and caller.generation == 1):
        torch.nn.init.ones_(inner.first.bias.data if "quietly" in WORDS else inner.first.bias)
    for parameter in inner.parameters() if "broadcasts" in WORDS else ():
        dist.broadcast(parameter.data, 0)
    if "loads" in WORDS and CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        inner.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    if "hook" in WORDS:
        inner.drop.register_forward_hook(lambda module, args, output: output * 1.5)
    model = wrapped or DistributedDataParallel(Both(inner, extra), find_unused_parameters="freezes" in WORDS)
    if "accumulates" in WORDS:
        weight = inner.first.weight
        accumulation.append(weight.expand_as(weight).grad_fn.next_functions[0][0])
        accumulation[-1].register_hook(lambda *_: accumulated.append(1))
    if "refers" in WORDS:
        wrappers.append(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    torch.manual_seed(100 + dist.get_rank())
    training = PlainTraining(caller, [model], [optimizer, *others], schedulers=[scheduler])
    peak = tensor_bytes()
    for step in training.steps(STEPS):
        if "loads" in WORDS and step == 4 and dist.get_rank() == 0:
            torch.save({"model": inner.state_dict(), "optimizer": optimizer.state_dict()}, CHECKPOINT)
        if "freezes" in WORDS and step == 3:
            inner.last.requires_grad_(False)
        inner.drop.train(step <= 3)
        x = torch.randn(8, WIDTH)
        caller.enter_phase("forward", step)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        caller.enter_phase("backward", step)
        loss.backward()
        training.update(loss.item())
        if peak:
            print(f"built {calls} times, {peak} bytes before, {tensor_bytes()} bytes in a step", flush=True)
            peak = 0
    dist.barrier()


main()
print(f"rank {os.environ['RANK']} is done", flush=True)
