"""Recovery for torchtitan's Trainer: ``train(trainer)`` in the place of ``trainer.train()``.

    from checkpointless import HPWrapper
    from checkpointless.integrations.torchtitan import train

    @HPWrapper()
    def main():
        trainer = ConfigManager().parse_args().build()
        try:
            train(trainer)
        finally:
            trainer.close()

The Trainer has the loop (:mod:`checkpointless.integrations.torch.stepped`). If training resumes in the middle of a
step, between its update and the next step, the Trainer saves and validates once more; the step is not logged again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from checkpointless.inprocess import HPCallWrapper, UnrecoverableError, active_call_wrapper
from checkpointless.integrations.compat import installed
from checkpointless.integrations.torch.repeated_steps import repeated_steps
from checkpointless.integrations.torch.stepped import SteppedTraining, led
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.serialization import state_tree

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

_SEAMS = ("train_step", "forward_backward_step", "optimizers", "lr_schedulers", "model_parts", "dataloader")
_UNKNOWN = "torchtitan {} has no Trainer.{}: checkpointless follows the loop of 0.3, install torchtitan>=0.3,<0.4"


def train(trainer: Trainer, *, state: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Train as ``trainer.train()`` does, and resume from memory after a fault.

    Call it once, in a function that is wrapped with :class:`checkpointless.HPWrapper` and builds the Trainer.
    Outside of one it is ``trainer.train()``. Restored are model, optimizers, schedulers, random streams, the data
    loader's and the Trainer's ``state_dict``.

    Args:
        trainer: the Trainer, or one of a subclass.
        state: what else changes from step to step, by name, as :class:`~checkpointless.PlainTraining` takes it.

    Raises:
        UnrecoverableError: something that is configured cannot be carried through a fault.
        StateLostError: steps were committed and no rank holds them any more.
    """
    call = active_call_wrapper()
    if call is None:
        trainer.train()
        return
    reason = _refusal(trainer)
    if reason is not None:
        raise UnrecoverableError(reason)
    call.enter_phase("init", call.high_water)
    if call.high_water == 0:  # later memory has what is newer, and a save may be half written
        trainer.checkpointer.load(step=trainer.config.checkpoint.load_step)
    call.beat()
    training = _TitanTraining(call, trainer, state)
    training.recover()
    call.beat()
    with (
        led(trainer, {"train_step": training.make_step, "forward_backward_step": training.compute}),
        led(trainer.checkpointer, {"load": lambda *args, **kwargs: False}),
    ):
        trainer.train()
    training.end()


def _refusal(trainer: Trainer) -> str | None:
    """Return why a training cannot be recovered exactly, in one line that says what to change; None: it can be."""
    missing = next((name for name in _SEAMS if not hasattr(trainer, name)), None)
    if missing is not None:
        return _UNKNOWN.format(installed(["torchtitan"]).get("torchtitan", ""), missing)
    settings = trainer.config.training, trainer.config.checkpoint
    if not settings[0].disable_cuda_graphs:
        return "CUDA graphs: gradients are given up after each update: set --training.disable_cuda_graphs"
    if settings[1].enable and getattr(settings[1], "async_mode", "") != "disabled":
        return "a save in the background would be cut off: set --checkpoint.async_mode disabled"
    if getattr(trainer.dataloader, "num_workers", 0) > 0:
        return "loader workers: after a fault in a later pass they read other data: set --dataloader.num_workers 0"
    return None


class _TitanTraining(SteppedTraining):
    def __init__(self, call: HPCallWrapper, trainer: Trainer, state: Mapping[str, Any]) -> None:
        self._trainer = trainer
        loader = trainer.dataloader
        if getattr(loader, "generator", loader) is None:
            loader.generator = torch.Generator().manual_seed(0)  # so that making an iterator again draws nothing
        if getattr(loader, "snapshot_every_n_steps", 1) is None:
            loader.snapshot_every_n_steps = 1
        super().__init__(call, trainer.model_parts, list(trainer.optimizers), list(trainer.lr_schedulers), state)
        if call.faults is not None:
            trainer.model_parts[-1].register_forward_hook(self._announce_backward)

    def recover(self) -> None:
        """Recover from memory, if there is something to recover. Collective."""
        trainer = self._trainer
        if self.resume(trainer.step) is not None:
            trainer.load_state_dict(self.own["trainer"])
            trainer.step = self.step - (self.point is SnapshotPoint.COMMITTED)
            trainer.dataloader.load_state_dict(self.own["data"])

    def make_step(self, original: Callable[..., None], *args: Any) -> None:
        """Make a step, or no more than step the schedulers if its update is made already."""
        self.begin_step()
        if self.replayed is not None:
            self._trainer.optimizers.step()
            self._trainer.lr_schedulers.step()
            return
        self._call.begin_step(self.step + 1)
        self._call.enter_phase("data", self.step + 1)
        original(*args)

    def compute(self, original: Callable[..., torch.Tensor], **batch: Any) -> torch.Tensor:
        making = self._call.steps.making
        self._call.enter_phase("forward", making)
        repeated_steps.take(making, batch)
        loss = original(**batch)
        self.losses.append(loss.detach())
        return loss

    def _announce_backward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Announce the phase ``backward``, for faults on purpose."""
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: self._call.enter_phase("backward", self._call.steps.making))

    def _noted(self) -> dict[str, Any]:
        trainer = self._trainer
        return {"trainer": trainer.state_dict(), "data": state_tree.copy(trainer.dataloader.state_dict())}
