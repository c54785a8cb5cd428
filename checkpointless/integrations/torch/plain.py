"""Recovery for a hand-written training loop: any modules, any ``torch.optim`` optimizer, no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from typing_extensions import override

from checkpointless.inprocess import HPCallWrapper, UnrecoverableError
from checkpointless.integrations.torch.gradient_check import GradientCheck
from checkpointless.integrations.torch.loop import LoopTraining
from checkpointless.integrations.torch.torch_tensors import TorchTensors
from checkpointless.recovery.manager import running_block
from checkpointless.state.journal import Captured, StepBefore
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.serialization.state_tree import is_fixed
from checkpointless.state.serialization.tensor_memory import local_part
from checkpointless.transfer.exchange import true_on_all
from checkpointless.transfer.tensor_entry import Key

_LATE = (
    "{} between update() of step {} and the next step, which is not made again after a fault: schedulers in "
    "PlainTraining(schedulers=[...]) step with every update (but a ReduceLROnPlateau, at the beginning of a step), "
    "and what the loop itself changes it changes in a step, before its update()"
)
_LEFT_OUT = (
    "a learning-rate scheduler of {} is not known here, and would begin anew after a fault: give it to "
    "PlainTraining(schedulers=[...]), and do not call its step(), which every update does (but that of a "
    "ReduceLROnPlateau, at the beginning of a step)"
)
_FREEZES, _RATES = "requires_grad of parameters was changed", "learning rates were changed"
_STEPS = "the step() of a ReduceLROnPlateau was called"
_WATCHED = 3  # steps: an average may begin as what it follows


class PlainTraining(LoopTraining):
    """Modules, optimizers and schedulers of a hand-written training loop, for
    :class:`~checkpointless.recovery.CheckpointManager`.

    Inside a function wrapped with :class:`checkpointless.inprocess.HPWrapper`::

        training = PlainTraining(modules=[model], optimizers=[optimizer])
        for step in training.steps(1000):
            loss = model(batch_of(step)).mean()
            loss.backward()            # and the gradients' all-reduce
            training.update()          # in place of optimizer.step() and optimizer.zero_grad()

    A batch must follow from the step's number and the random streams; each rank gets its own streams back after a
    fault. If the batch comes from a ``DataLoader`` whose workers draw random numbers, pass the loader to
    :func:`~checkpointless.recovery.seed_data_workers` and give it a separate ``generator``. Otherwise each iterator
    draws a number from the training's stream, and after a fault there is one iterator more. Gradients must be final
    (reduced and clipped) when :meth:`update` is called. Of the phases of fault specs, ``before_optimizer`` to
    ``between`` and ``recovery`` are announced.

    Args:
        call: the running wrapper, whose ``checkpoint_manager`` is used. None: it is found.
        modules: the trained modules.
        optimizers: their optimizers.
        schedulers: the learning-rate schedulers, which step with every update. A ``ReduceLROnPlateau`` steps when
            the loop calls its ``step`` at the beginning of a step, with the same metric on all ranks.
        state: other state that steps change, by name: objects with ``state_dict`` and ``load_state_dict``; lists,
            dicts, sets, deques and tensors, which are restored in place; random generators;
            :class:`~checkpointless.Value` for numbers. Change it in a step, before its :meth:`update`.
        scaler: a loss scaler (``torch.amp.GradScaler``). Call its ``unscale_`` and ``update`` before
            :meth:`update`, which leaves overflows out.
        group: the global ranks that hold the same modules and optimizers. Default: read from the meshes
            of DTensors (FSDP2, HSDP, tensor parallelism by a plan), else all ranks (data parallel).
        sdc_check_every: in every so many steps, and in the first of a generation, :attr:`checked` looks for
            gradients that a device computes wrongly, which costs another pass; None: never.

    Attributes:
        checked: runs the forward and backward pass of a step's last micro-batch, ``training.checked(compute)``, and
            returns what ``compute()`` returned. If the step is due, ``compute`` runs once more from the same random
            streams and buffers, and a third time if gradients differ; wrong ones cost the step, which is redone on
            all ranks. It changes nothing else, and takes no batch. All ranks call it.

    Raises:
        UnrecoverableError: the modules cannot be recovered.
        ValueError: this rank is in no mesh of a parameter, no module or optimizer is given, no block is running, or
            ``sdc_check_every`` is less than 1 or does not go with sharded parameters.
    """

    _how_to_get_replicas = (
        "A mesh with a dimension of replicas (HSDP) helps, or group=, if ranks outside of the mesh hold the same"
    )

    def __init__(
        self,
        call: HPCallWrapper | None = None,
        modules: Iterable[torch.nn.Module] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        schedulers: Sequence[Any] = (),
        state: Mapping[str, Any] = MappingProxyType({}),
        scaler: torch.amp.GradScaler | None = None,
        group: Sequence[int] | None = None,
        sdc_check_every: int | None = None,
    ) -> None:
        call, modules = running_block(call), list(modules)
        if not modules or not optimizers:
            raise ValueError("PlainTraining(modules=[...], optimizers=[...]): give the modules and the optimizers")
        self._tensors = TorchTensors(modules, optimizers, is_known=call.high_water > 0, group=group)
        self._by_update: dict[tuple[str, int], object] = {}
        self._updated = 0  # the newest step that was updated in this entry
        self._scales = isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()
        declared = {**state, "scaler": scaler} if scaler is not None else state
        self._check = GradientCheck(sdc_check_every, self._tensors, call)
        self.checked = self._check.run
        super().__init__(self._tensors, call, schedulers, declared, [state, *optimizers])

    def update(self, loss: float | None = None) -> None:
        """Apply the gradients, on all ranks or on none, and clear them.

        Args:
            loss: the loss of the step, which is kept with the step if steps are recorded.
        """
        self._refuse_early("in a step before its update()")
        self._check.require()
        if self._scales:
            _leave_out_overflows(self._tensors.optimizers)
        self._compute(loss)
        self._guard(self.state.finish_update)
        self.step = self._call.steps.making
        self._record(loss)
        self._clear_gradients()

    @override
    def _restore(self, done: int) -> None:
        left_out = _without_scheduler(self._tensors.optimizers, self._schedulers)
        if left_out is not None:
            raise UnrecoverableError(_LEFT_OUT.format(left_out))
        super()._restore(done)

    @override
    def _step_scheduler(self, scheduler: Any) -> None:
        """Make one step of a scheduler, but of one that steps by a metric: the loop does."""
        if not _plateaus([scheduler]):
            super()._step_scheduler(scheduler)

    @override
    def committed(
        self, step: int, ready: Captured, before: StepBefore | None
    ) -> Callable[[], dict[str, Any]] | None:
        self._by_update, self._updated = self._loops_part(), step
        self._noted = {}  # a loop that is left by break goes on from here
        if self._is_young():
            self._note()
        return super().committed(step, ready, before)

    @override
    def reached(self, step: int, point: SnapshotPoint) -> Captured:
        """Capture the loop's state at the beginning of the step after ``step``.

        Raises:
            UnrecoverableError: after the update the loop has frozen or freed parameters, changed learning rates or
                other parameters, or stepped a scheduler.
        """
        if 0 < step == self._updated:
            then, now = self._by_update, self._loops_part()
            late = next((what for what in now if then.get(what, now[what]) != now[what]), None)
            if late is not None:
                raise UnrecoverableError(_LATE.format(late[0], step))
            self._refuse_early("between update() and the next step")
        if self._is_young():
            self._note()
        return super().reached(step, point)

    def _loops_part(self) -> dict[tuple[str, int], object]:
        """Return what a loop may change in a step only, such as learning rates; no tensors."""
        part: dict[tuple[str, int], object] = {(_FREEZES, 0): self._tensors.trained()}
        groups = (group for optimizer in self._tensors.optimizers for group in optimizer.param_groups)
        for number, group in enumerate(groups):
            for name, value in group.items():
                if is_fixed(value):
                    part[_RATES if name == "lr" else f"{name} of param groups was changed", number] = value
        part[_STEPS, 0] = [each.last_epoch for each in _plateaus(self._schedulers)]
        return part

    def _is_young(self) -> bool:
        return max(self.step, self._call.high_water) - self._done < _WATCHED

    def _refuse_early(self, when: str) -> None:
        """Refuse, in the first steps of a job, what is changed outside of updates."""
        if self._is_young() and self.step > self._done:  # the first step may give first values
            self._refuse_changes(when)

    @override
    def _title_of(self, key: Key) -> str:
        return super()._title_of(key) if key[0] == "model" else self._tensors.title_of(key)

    @override
    def _arrange(self) -> None:
        self._tensors.arrange()
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for optimizer in self._tensors.optimizers:
            optimizer.zero_grad(set_to_none=True)


def _leave_out_overflows(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Clear the gradients of an optimizer if some have overflowed on any rank. Collective."""
    for optimizer in optimizers:
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"]]
        parts = [local_part(each) for each in gradients if each is not None]
        values = [each.coalesce().values() if each.is_sparse else each for each in parts]
        if not true_on_all(all(bool(each.isfinite().all()) for each in values)):
            optimizer.zero_grad(set_to_none=True)


def _without_scheduler(optimizers: Iterable[Any], schedulers: Iterable[Any]) -> str | None:
    """Return the class of an optimizer with a torch scheduler not in ``schedulers`` (plateaus leave no mark)."""
    known = [getattr(_inner(scheduler), "optimizer", None) for scheduler in schedulers]
    if any(optimizer is None for optimizer in known):
        return None  # of a kind that does not say whose it is
    for optimizer in map(_unwrapped, optimizers):
        is_scheduled = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
        if is_scheduled and not any(optimizer is _unwrapped(each) for each in known):
            return type(optimizer).__name__
    return None


def _plateaus(schedulers: Iterable[Any]) -> list[ReduceLROnPlateau]:
    """Return the schedulers that step by a metric: the loop calls their ``step``, and not the update."""
    return [inner for inner in map(_inner, schedulers) if isinstance(inner, ReduceLROnPlateau)]


def _inner(scheduler: Any) -> Any:
    return getattr(scheduler, "scheduler", scheduler)  # Accelerate's wrapper


def _unwrapped(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)
