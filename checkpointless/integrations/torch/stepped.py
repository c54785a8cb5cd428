"""A training whose loop is a trainer's: what the trainer calls as its optimizer's ``step`` is the update.

A step of the engine is an optimizer step, counted from 1. Its state is kept at two step boundaries: ``COMMITTED``,
when the optimizers have stepped and nothing that follows has happened, and ``CHECKED``, when the next step begins.
What lies between (scheduler, counters, logs, evaluation and save) is repeated if training resumes at the first: the
trainer goes through the step once more, whose update is made already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

from checkpointless.inprocess import HPCallWrapper, UnrecoverableError
from checkpointless.integrations.torch.loop import JournaledTraining
from checkpointless.integrations.torch.repeated_steps import repeated_steps
from checkpointless.integrations.torch.torch_tensors import TorchTensors
from checkpointless.recovery.guard import UpdateGuard
from checkpointless.state.journal import Captured
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.rank_local.agreement import require_equal_replicas, require_same_step

_COMPARED = (1, 2)  # the steps after which replicas are compared


class SteppedTraining(JournaledTraining):
    """The state of a trainer's training, for :class:`~checkpointless.recovery.CheckpointManager`.

    Args:
        optimizers: torch's; the trainer calls ``step`` of the first one first, and all of them in one step.
        schedulers: the learning-rate schedulers, which the trainer steps after the update.
        state: what else changes from step to step, by name.

    Attributes:
        losses: of the batches of the step in the making.
        replayed: what was kept of a committed step that is gone through again; None: none is.
    """

    def __init__(
        self,
        call: HPCallWrapper,
        modules: Iterable[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        state: Mapping[str, Any],
    ) -> None:
        self.losses: list[torch.Tensor] = []
        self.replayed: Mapping[str, Any] | None = None
        self._done = 0  # steps before the job
        self._is_resuming = True  # until the first step begins
        self._tensors = TorchTensors(modules, optimizers, is_known=call.high_water > 0)
        self._tensors.steps = [each.step for each in optimizers]  # which lead here from now on
        super().__init__(self._tensors, call, schedulers, state)
        self._guard = UpdateGuard(call, self._journal)
        for number, each in enumerate(optimizers):
            setattr(each, "step", functools.partial(self._update, number == 0))  # noqa: B010

    # --- when the block is entered ----------------------------------------------------------------------------

    def resume(self, step: int) -> dict[str, Any] | None:
        """Recover model, optimizers and schedulers from memory, if there is something to recover. Collective.

        The trainer would begin after ``step``. Return what :meth:`_capture` captured; None: nothing was recovered.
        """
        self.step = step
        self._tensors.arrange()
        for optimizer in self._tensors.optimizers:
            optimizer.zero_grad(set_to_none=True)
        objects = self._recover()
        if objects is None:
            self._done = step
            require_same_step(step)
            self._journal.begin(step, SnapshotPoint.LOADED)
        else:
            self.step, self._done = objects["step"], objects["done"]
            if self.point is SnapshotPoint.LOADED:
                self._manager.restore_streams()
        self._manager.attach(self._journal, self.step)
        self._call.steps.begin_data()
        return objects

    @property
    def point(self) -> SnapshotPoint | None:
        """The point that the recovery resumed at; None: nothing was recovered."""
        return self._manager.resumed_at[1] if self._manager.resumed_at is not None else None

    @property
    def own(self) -> Mapping[str, Any]:
        """What this rank alone had at the step boundary that the recovery resumed at."""
        own = self._manager.own.kept_at(*self._manager.resumed_at) if self._manager.resumed_at is not None else None
        if not own:
            raise UnrecoverableError(f"the trainer's counters of this rank after step {self.step} are lost")
        return own

    # --- while training ---------------------------------------------------------------------------------------

    @property
    def is_replaying(self) -> bool:
        """Whether the step in the making is committed already."""
        return self.replayed is not None or (self._is_resuming and self.point is SnapshotPoint.COMMITTED)

    def begin_step(self) -> None:
        """Put back or take the state at a step boundary."""
        self.losses = []
        if self._is_resuming and self.point not in (None, SnapshotPoint.LOADED):
            self._put_back()
            if self.point is SnapshotPoint.COMMITTED:
                self.replayed = self.own
        self._is_resuming = False
        if self.replayed is not None:
            return
        if self.step - self._done in _COMPARED and self._call.high_water < self.step:
            require_equal_replicas(self.state, self.step)
        self._journal.reached(self.step, SnapshotPoint.CHECKED)
        self._manager.make_copies(self.step)

    def _put_back(self) -> None:
        self._manager.restore_streams()

    def _update(self, is_first: bool, closure: None = None) -> None:
        """Apply the gradients, on all ranks or on none: an optimizer's ``step``; the first updates all."""
        if not is_first:
            return
        if self.replayed is not None:
            losses, self.replayed = self.replayed["losses"], None
            self._put_back()  # whatever the trainer has done meanwhile
            self._record(_sum(losses), once=True)
            return
        call, loss = self._call, _sum(self.losses)
        call.steps.loss = loss
        repeated_steps.compute(call.steps.making, loss)
        self._guard(self.state.finish_update)
        self.step = call.steps.making
        self._record(loss)
        call.end_step()
        call.enter_phase("between", self.step)

    def end(self) -> None:
        """Make no more copies of this training, whose loop is over."""
        self._manager.copies.finish()

    def _noted(self) -> dict[str, Any]:
        """Return what this rank alone has, as plain data that nobody changes."""
        return {}

    # --- what the journal asks for ------------------------------------------------------------------------------

    @override
    def ready(self, step: int) -> Captured:
        """Capture what this rank alone has, and the losses of ``step``."""
        losses = [each.cpu() for each in self.losses]
        return Captured(own={**self._noted(), "losses": losses}, loss=self._call.steps.loss)

    @override
    def reached(self, step: int, point: SnapshotPoint) -> Captured:
        return Captured(self._capture(step), self._noted())

    @override
    def _capture(self, step: int) -> Callable[[], dict[str, Any]]:
        capture, done = super()._capture(step), self._done
        return lambda: {**capture(), "done": done}


@contextmanager
def led(target: object, seams: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Have methods of ``target`` lead to ``seams`` by name meanwhile, which get the method before its arguments."""
    for name, seam in seams.items():
        setattr(target, name, functools.partial(seam, getattr(target, name)))
    try:
        yield
    finally:
        for name in seams:
            delattr(target, name)


def _sum(losses: Iterable[torch.Tensor]) -> float:
    return float(sum(each.item() for each in losses))
