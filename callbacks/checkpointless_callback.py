"""The callback that ties Lightning's loop to the running wrapper."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from checkpointless.callbacks.trainer_parts import job_step
from checkpointless.inprocess import HPCallWrapper, active_call_wrapper
from checkpointless.inprocess.finalize import register_cleanup

if TYPE_CHECKING:
    from nemo.lightning.pytorch.callbacks import PEFT


class CheckpointlessCallback(Callback):
    """Reports training progress to the wrapper and the agent, and selects which recovery levels are used.

    Args:
        enable_inprocess: after a fault, re-enter the block in the living process. False: the process ends and the
            agent starts a new one. Default: True (HyperPod: False).
        enable_checkpointless: recover the state from living replicas. False: from storage only. Default: as
            ``enable_inprocess``, which it needs (HyperPod: False).
        enable_checksum: compare the replicas of each shard before a recovery. Needs ``enable_checkpointless``.
        clean_tensor_hook: at a restart, remove the hooks of all parameters of the old model.
        clean_lightning_module: at a restart, drop the trainer's references to its module.

    Raises:
        ValueError: an option is set without the option that it needs.
    """

    def __init__(
        self,
        enable_inprocess: bool = True,
        enable_checkpointless: bool | None = None,
        enable_checksum: bool = False,
        clean_tensor_hook: bool = False,
        clean_lightning_module: bool = False,
    ) -> None:
        if enable_checkpointless is None:
            enable_checkpointless = enable_inprocess
        if enable_checkpointless and not enable_inprocess:
            raise ValueError("enable_checkpointless=True needs enable_inprocess=True")
        if enable_checksum and not enable_checkpointless:
            raise ValueError("enable_checksum=True needs enable_checkpointless=True")
        self.enable_inprocess = enable_inprocess
        self.enable_checkpointless = enable_checkpointless
        self.enable_checksum = enable_checksum
        self.clean_tensor_hook = clean_tensor_hook
        self.clean_lightning_module = clean_lightning_module
        self.tried_adapter_checkpointless = False
        self._is_peft: bool | None = None  # None: it has not been looked for in this fit
        self._making: tuple[int, int] | None = None  # the generation and the step in the making

    @staticmethod
    def get_wrapper_from_trainer(trainer: pl.Trainer) -> HPCallWrapper | None:
        """Return the wrapper that ``trainer`` runs in: ``trainer.wrapper`` if it was set, else the active one."""
        wrapper: HPCallWrapper | None = getattr(trainer, "wrapper", None)
        return wrapper if wrapper is not None else active_call_wrapper()

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Register the clean-up that the options ask for at a restart."""
        self._is_peft = None
        trainer_ref = weakref.ref(trainer)
        if self.clean_tensor_hook:
            register_cleanup("tensor hooks", lambda: _clean_tensor_hooks(trainer_ref()))
        if self.clean_lightning_module:
            register_cleanup("lightning module", lambda: _clean_lightning_module(trainer_ref()))

    @staticmethod
    def get_peft_callback(trainer: pl.Trainer) -> PEFT | None:
        """Return NeMo's PEFT callback among those of ``trainer``, or None."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        return next((each for each in callbacks if hasattr(each, "set_params_to_save")), None)

    def _try_adapter_checkpointless_restore(self, trainer: pl.Trainer, params_to_save: set[str]) -> None:
        """Notify the strategy, once, that a PEFT run's adapters are in place (after a fault: earlier)."""
        if self.tried_adapter_checkpointless:
            return
        self.tried_adapter_checkpointless = True
        adapters_added = getattr(trainer.strategy, "adapters_added", None)
        if adapters_added is not None:
            adapters_added(params_to_save)

    @override
    def on_train_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Report to the wrapper that an optimizer step begins."""
        if self._is_peft is None:
            peft = self.get_peft_callback(trainer)
            self._is_peft = peft is not None
            if peft is not None:
                self._try_adapter_checkpointless_restore(trainer, peft.params_to_save)
        wrapper = self.get_wrapper_from_trainer(trainer)
        if wrapper is not None and not _is_replaying(trainer):
            step = job_step(trainer) + 1
            if self._making == (wrapper.generation, step):
                wrapper.beat()  # one more batch of the step
            else:
                self._making = wrapper.generation, step
                wrapper.begin_step(step)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report to the wrapper that an optimizer step is over."""
        wrapper = self.get_wrapper_from_trainer(trainer)
        if wrapper is not None and not _is_replaying(trainer) and not trainer.fit_loop._should_accumulate():
            wrapper.steps.end()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report to the wrapper that the last step is over: what follows is not training time."""
        wrapper = self.get_wrapper_from_trainer(trainer)
        if wrapper is not None:
            wrapper.steps.end_training(trainer.global_step)

    @override
    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Show the agent that validation makes progress, too."""
        wrapper = self.get_wrapper_from_trainer(trainer)
        if wrapper is not None:
            wrapper.beat()


def _is_replaying(trainer: pl.Trainer) -> bool:
    return bool(getattr(trainer.strategy, "replaying", False))


def _clean_tensor_hooks(trainer: pl.Trainer | None) -> None:
    model = getattr(getattr(trainer, "strategy", None), "model", None)
    if model is None:
        return
    for parameter in model.parameters():
        parameter._backward_hooks = None
        parameter._post_accumulate_grad_hooks = None


def _clean_lightning_module(trainer: pl.Trainer | None) -> None:
    strategy = getattr(trainer, "strategy", None)
    if strategy is not None:
        strategy.model = None
        strategy._lightning_module = None
