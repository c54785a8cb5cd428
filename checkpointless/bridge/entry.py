"""Bridge's entry points, which recover from faults inside a block."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron.bridge.training import pretrain as bridge

from checkpointless.bridge.generation import BridgeGeneration
from checkpointless.bridge.refusals import refusal
from checkpointless.bridge.seams import entered
from checkpointless.inprocess import UnrecoverableError, active_call_wrapper
from checkpointless.megatron import cleanup, cpu_platform

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks import Callback, CallbackManager
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.forward_step_func_types import ForwardStepCallable


def pretrain(
    config: ConfigContainer,
    forward_step_func: ForwardStepCallable,
    callbacks: list[Callback] | CallbackManager | None = None,
    *,
    state: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Train as ``megatron.bridge.training.pretrain.pretrain`` does, and resume from memory after a fault.

    Call it in a function that is wrapped with :class:`checkpointless.inprocess.HPWrapper`. Outside of one it is
    Bridge's own. Each entry works on a copy of the configuration, because Bridge writes into it.

    Args:
        config: Bridge's configuration.
        forward_step_func: the function that makes a forward step.
        callbacks: Bridge's callbacks. What they keep for themselves begins anew, unless it is declared.
        state: what callbacks and the forward step change from step to step, by name, as
            :class:`~checkpointless.PlainTraining` takes it. Outside of a wrapped function it is left alone.

    Raises:
        ValueError: an object in ``state`` has no state, or one that cannot be kept.
        UnrecoverableError: something that is configured cannot be carried through a fault; or steps were committed
            and neither memory nor storage holds them any more.
    """
    call = active_call_wrapper()
    if call is None:
        bridge.pretrain(config, forward_step_func, callbacks)
        return
    reason = refusal(config)
    if reason is not None:
        raise UnrecoverableError(reason)
    if cpu_platform.requested():
        cpu_platform.install()  # with what Bridge needs, now that it is imported
    cleanup.install()
    config = _copied(config)
    with entered(BridgeGeneration(call, config, state)):
        bridge.pretrain(config, forward_step_func, callbacks)


def finetune(
    config: ConfigContainer,
    forward_step_func: ForwardStepCallable,
    *,
    state: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Train as ``megatron.bridge.training.finetune.finetune`` does, and resume from memory after a fault.

    Args:
        config: Bridge's configuration, with a checkpoint to begin with.
        forward_step_func: the function that makes a forward step.
        state: see :func:`pretrain`.

    Raises:
        ValueError: the configuration names no checkpoint, or see :func:`pretrain`.
        UnrecoverableError: see :func:`pretrain`.
    """
    if config.checkpoint.pretrained_checkpoint is None and config.checkpoint.load is None:
        raise ValueError(
            "finetune begins with a checkpoint: set checkpoint.pretrained_checkpoint or checkpoint.load"
        )
    pretrain(config, forward_step_func, state=state)


def _copied(config: ConfigContainer) -> ConfigContainer:
    """Return a configuration into which Bridge can write: its sections are copies, with their lists and dicts."""
    copied = copy.copy(config)
    for field in dataclasses.fields(config):
        section = getattr(config, field.name)
        if not dataclasses.is_dataclass(section) or isinstance(section, type):
            continue
        section = copy.copy(section)
        for name, value in vars(section).items():
            if type(value) in (list, dict):
                setattr(section, name, copy.copy(value))
        setattr(copied, field.name, section)
    return copied
