"""Train in DDP, in a loop with one habit that users have: ``STEPS HABIT``.

``frees`` trains parameters from step 4 on, and freezes others from step 7 on; ``frees-late`` does so behind the
update of step 4. ``adds`` gives the optimizer more in step 4.
"""

import copy
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining

STEPS, HABIT = int(sys.argv[1]), sys.argv[2]
WIDTH, ROWS = 16, 96


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(torch.randn_like(parameter), alpha=1e-3)
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Keeps a number under a key that is no parameter."""

    def step(self, closure: Any = None) -> Any:
        state: Any = self.state
        state["all"]["steps"] = state["all"].get("steps", 0) + 1
        return super().step(closure)


class Saving(torch.optim.SGD):
    """Keeps a number in its own state dict."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": 1}


class Louder(torch.nn.Module):
    """Counts its calls in torch's extra state."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return x * (1 + 0.01 * self.calls)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Late(torch.nn.Module):
    """Has its buffer only when it has been called."""

    scale: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = torch.full((), 0.5)
        return x * self.scale


class Positions(torch.nn.Module):
    """Has a buffer that grows with the longest batch it has seen."""

    cached: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cached", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.cached):
            self.cached = torch.arange(float(len(x))).cos()
        return x * self.cached[: len(x), None]


class Bounded(torch.nn.Module):
    """Has weights whose norms are bounded in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(8, WIDTH, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows(torch.arange(len(x)) % 8)


def scheduled(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Make an optimizer with a scheduler that the training is not told of."""
    optimizer = torch.optim.SGD(parameters, lr)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    return optimizer


OPTIMIZERS: dict[str, Any] = {
    "noise": Noisy,
    "counts": Counting,
    "saves": Saving,
    "schedules": scheduled,
    "forgets": functools.partial(torch.optim.SGD, momentum=0.9),
    "frees": torch.optim.AdamW,
}
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "extra-state": Louder,
    "late-buffer": Late,
    "grows": Positions,
    "bounds": Bounded,
    "epochs-change": functools.partial(torch.nn.BatchNorm1d, WIDTH),
}
OUTSIDE: dict[str, torch.nn.Sequential] = {}  # what is not built once more when the block is entered again
EPOCH = 3  # steps


class Rows:
    """Where batches come from."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.loader: Any = DataLoader(data, batch_size=4)  # type: ignore[arg-type]
        self.over: Any = None

    def take(self, step: int) -> torch.Tensor:
        if HABIT == "goes-through":
            self.over = self.over or iter(self.loader)
            batch: torch.Tensor = next(self.over)
            return batch
        return self.data[torch.randint(ROWS, (4 + step // 3 if HABIT == "grows" else 8,))]


def follow(teacher: torch.nn.Module, inner: torch.nn.Module) -> None:
    if HABIT == "follows":
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), inner.parameters()):
                mine.mul_(0.9).add_(theirs, alpha=0.1)


def change_what_is_trained(inner: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    if (HABIT, step) == ("frees", 4):
        inner[0].requires_grad_(True)
    if (HABIT, step) == ("frees", 7):
        inner[3].bias.requires_grad_(False)
    if (HABIT, step) == ("adds", 4):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


def reduce_gradients(inner: torch.nn.Module) -> None:
    for each in inner.parameters() if "frees" in HABIT else ():  # DDP does not know what is trained later
        if each.grad is not None:
            dist.all_reduce(each.grad)


def change_behind_update(inner: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    if (HABIT, step) == ("frees-late", 4):
        inner[0].requires_grad_(True)
    with torch.no_grad():
        for each in inner.parameters() if HABIT == "clamps" else ():
            each.clamp_(-0.2, 0.2)
    if HABIT == "decays":
        optimizer.param_groups[0]["weight_decay"] += 0.01
    for state in optimizer.state.values() if HABIT == "forgets" else ():
        state["momentum_buffer"].mul_(0.5)


def ends_of_calls() -> list[int]:
    if HABIT in ("epochs", "epochs-change", "resets"):
        return [*range(EPOCH, STEPS, EPOCH), STEPS]
    return [STEPS] * (4 if HABIT == "breaks" else 1)


def enter_step(caller: HPCallWrapper, step: int, validate_others: Callable[[], None]) -> None:
    """Enter the first phase of a step, behind a validation only when all ranks are in the step.

    One may still be leaving the barrier of the validation, whose draws a fault would take from it.
    """
    if HABIT.startswith("exchanges"):
        return validate_others()
    if HABIT == "validates":
        dist.barrier()
    if HABIT == "doubles":
        torch.set_default_dtype(torch.float64)
    caller.enter_phase("data", step)
    torch.set_default_dtype(torch.float32)


def validate_others(
    caller: HPCallWrapper, training: PlainTraining, inner: torch.nn.Module, data: torch.Tensor, step: int
) -> None:
    """Validate with other weights; a fault may come meanwhile."""
    with training.other_weights(), torch.no_grad():
        kept = [parameter.clone() for parameter in inner.parameters()]
        try:
            for parameter in inner.parameters():
                parameter.mul_(0.5)
            caller.enter_phase("data", step)
            inner(data)
            if HABIT == "exchanges-slowly":
                dist.barrier()  # no rank puts them back behind the validation when another meets its fault in it
        finally:
            for parameter, weights in zip(inner.parameters(), kept):
                for _ in range(10 if HABIT == "exchanges-slowly" else 0):
                    time.sleep(0.01)  # as copies of a large model from the host's memory
                parameter.copy_(weights)


def validate(inner: torch.nn.Module, data: torch.Tensor) -> None:
    draws: Any = DataLoader(data, batch_size=32, shuffle=True)  # type: ignore[arg-type]
    with torch.no_grad():
        inner.eval()
        for batch in draws if HABIT == "validates" else [data]:
            inner(batch)
        inner.train()
    dist.barrier()  # no rank is still in its validation when the next step meets its fault


def change_between(inner: torch.nn.Module, data: torch.Tensor) -> None:
    """Change between two calls of ``steps()`` what belongs to the state, if that is the habit."""
    if HABIT == "resets":
        inner[0].reset_parameters()  # type: ignore[index, operator]
    if HABIT in ("epochs-change", "breaks"):
        inner(data[torch.randint(ROWS, (8,))])  # draws, and moves what the normalization has seen


def build_model() -> tuple[torch.nn.Module, torch.nn.Module]:
    between = LAYERS.get(HABIT, torch.nn.Identity)()
    layers = (torch.nn.Linear(WIDTH, WIDTH), between, torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, WIDTH))
    inner = torch.nn.Sequential(*layers)
    if HABIT == "hooks-all":
        register_module_forward_hook(lambda module, _, y: y * 0.9 if isinstance(module, torch.nn.Dropout) else y)
    if HABIT == "outside":
        inner = OUTSIDE.setdefault("inner", inner)
    inner[0].requires_grad_("frees" not in HABIT)
    if HABIT == "local" or "frees" in HABIT:
        return inner, inner
    model = DistributedDataParallel(inner)
    if HABIT == "compresses":
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    return inner, model


def kept_slowly(training: PlainTraining) -> PlainTraining:
    """Let a fault find a rank between its buffers and its streams, which belong together, if that is the habit."""
    if HABIT != "epochs-change":
        return training
    manager: Any = training._manager
    store = manager.store_rng_states

    def store_late(*args: Any, **more: Any) -> None:
        for _ in range(15):
            time.sleep(0.01)
        store(*args, **more)

    manager.store_rng_states = store_late
    return training


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = torch.randn(ROWS, WIDTH)
    inner, model = build_model()
    modules: list[torch.nn.Module] = [model]
    optimizer = OPTIMIZERS.get(HABIT, torch.optim.SGD)(model.parameters(), lr=0.05)
    teacher, beside = copy.deepcopy(inner).requires_grad_(False), AveragedModel(inner)
    if HABIT == "follows":
        modules.append(teacher)
    torch.manual_seed(100 + dist.get_rank())
    if HABIT == "warms-up":
        model(data[:8]).sum().backward()
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=1) if "plateau" in HABIT else None
    known = [] if plateau is None else [plateau]
    training = kept_slowly(PlainTraining(caller, modules, [optimizer], schedulers=known))
    if HABIT == "two-trainings":
        PlainTraining(caller, modules, [optimizer])
    rows = Rows(data)

    def make(step: int) -> None:
        follow(teacher, inner)
        change_what_is_trained(inner, optimizer, step)
        enter_step(caller, step, functools.partial(validate_others, caller, training, inner, data, step))
        if HABIT == "plateaus" and plateau is not None and step % 2 == 0:
            plateau.step(1.0)
        x = rows.take(step) + (caller.generation if HABIT == "other-batch" else 0)
        caller.enter_phase("forward", step)
        loss = (model(x) - x.roll(1, 1)).square().mean() * (1 + caller.generation * (HABIT == "other-loss"))
        caller.enter_phase("backward", step)
        loss.backward()
        reduce_gradients(inner)
        if HABIT == "other-loss" and dist.get_rank() == 1 and caller.generation == 0:
            time.sleep(1.0)  # rank 0 has the gradients, too, and keeps its loss meanwhile
        if HABIT == "stops" and step == STEPS - 2 and dist.get_rank() == 0:
            training.stop()
        training.update(loss.item())
        if HABIT == "late-plateau" and plateau is not None:
            plateau.step(1.0)
        change_behind_update(inner, optimizer, step)
        if HABIT == "averages-beside":
            beside.update_parameters(inner)
        if HABIT == "two-updates":
            training.update(loss.item())

    for last in ends_of_calls():
        for step in training.steps(last):
            if HABIT == "validates":
                dist.barrier()  # all have begun the step, and none is behind the last one, when it meets its fault
            make(step)
            if HABIT == "validates":
                validate(inner, data)
            if HABIT == "breaks" and step % 5 == 0:
                break
        change_between(inner, data)
        if HABIT in ("breaks", "epochs"):
            dist.barrier()  # no rank is still in its update
            caller.enter_phase("between", 100 + training.step)
            validate(inner, data)
    dist.barrier()


main()
