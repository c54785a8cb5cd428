"""Bridge's entry points, which recover from faults inside a block."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron.bridge.training import pretrain as bridge

from checkpointless.inprocess import UnrecoverableError, active_call_wrapper
from checkpointless.integrations.compat import BRIDGE, CORE, installed, untested
from checkpointless.integrations.compat import megatron as compat
from checkpointless.integrations.megatron import cleanup, cpu_platform
from checkpointless.integrations.megatron.pretrain_generation import (
    REFUSALS,
    PretrainGeneration,
    Refusal,
    first_refusal,
    is_given,
)
from checkpointless.integrations.megatron_bridge.seams import SEAMS
from checkpointless.system.environment import RANK_ENV

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks import Callback, CallbackManager
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.forward_step_func_types import ForwardStepCallable

logger = logging.getLogger(__name__)


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
        callbacks: Bridge's callbacks. What they keep for themselves starts over, unless it is declared.
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
    strange = untested(installed((BRIDGE, CORE)))
    if strange is not None and call.is_first and os.environ.get(RANK_ENV, "0") == "0":
        logger.warning("%s; `checkpointless rehearse` shows whether a training with them is exact", strange)
    if cpu_platform.requested():
        cpu_platform.install()  # with what Bridge needs, now that it is imported
    cleanup.install()
    config = _copied(config)
    with SEAMS.entered(PretrainGeneration(call, state)):
        bridge.pretrain(config, forward_step_func, callbacks)


def finetune(
    config: ConfigContainer,
    forward_step_func: ForwardStepCallable,
    callbacks: list[Callback] | CallbackManager | None = None,
    *,
    state: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Train as ``megatron.bridge.training.finetune.finetune`` does, and resume from memory after a fault.

    Args:
        config: Bridge's configuration, with a checkpoint to begin with.
        forward_step_func: the function that makes a forward step.
        callbacks: see :func:`pretrain`.
        state: see :func:`pretrain`.

    Raises:
        ValueError: the configuration names no checkpoint, or see :func:`pretrain`.
        UnrecoverableError: see :func:`pretrain`.
    """
    if config.checkpoint.pretrained_checkpoint is None and config.checkpoint.load is None:
        raise ValueError(
            "finetune begins with a checkpoint: set checkpoint.pretrained_checkpoint or checkpoint.load"
        )
    compat.require_checkpoint(config)
    pretrain(config, forward_step_func, callbacks, state=state)


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


# --- Settings of Megatron-Bridge that are refused -----------------------------------------------------------------


#: Where Bridge has the settings of Megatron-LM.
_PATHS = {
    "inprocess_restart": "inprocess_restart.enabled",
    "enable_ft_package": "ft.enable_ft_package",
    "use_megatron_fsdp": "dist.use_megatron_fsdp",
    "use_torch_fsdp2": "dist.use_torch_fsdp2",
    "dataloader_type": "dataset.dataloader_type",
    "iterations_to_skip": "train.iterations_to_skip",
    "moe_expert_rank_capacity_factor": "model.moe_expert_rank_capacity_factor",
    "qk_clip": "model.qk_clip",
    "optimizer": "optimizer.optimizer",
    "optimizer_cuda_graph": "optimizer.optimizer_cuda_graph",
    "rerun_mode": "rerun_state_machine.rerun_mode",
    "error_injection_rate": "rerun_state_machine.error_injection_rate",
    "async_save": "checkpoint.async_save",
    "log_straggler": "straggler.log_straggler",
    "use_pytorch_profiler": "profiling.use_pytorch_profiler",
}
_REFUSALS = (
    *(dataclasses.replace(each, setting=_PATHS[each.setting]) for each in REFUSALS),
    Refusal("ddp.use_megatron_fsdp", "does not know the shards of Megatron's FSDP"),
    Refusal("dist.use_decentralized_pg", "finds replicas by Megatron's parallel state, which it leaves out"),
    Refusal("dist.lazy_init", "has no process groups to find replicas by"),
    Refusal("peft", "has not been tried with Bridge's PEFT", "None", is_given),
    Refusal("model.dist_train.use_dist_train", "finds replicas by one parallel state"),
    Refusal("nvrx_straggler.enabled", "cannot start its detector twice"),
    Refusal("tensor_inspect.enabled", "does not carry what it collects"),
)


def refusal(config: ConfigContainer) -> str | None:
    """Return why a training with ``config`` cannot be recovered exactly.

    Args:
        config: the configuration that is given to ``pretrain``.

    Returns:
        One line that says what to set; None if there is no obstacle.
    """
    return first_refusal(_REFUSALS, lambda setting: _value(config, setting))


def _value(config: object, setting: str) -> object:
    """Return the value of a setting; None where a part of its path is None or not known to this version."""
    try:
        return attrgetter(setting)(config)
    except AttributeError:
        return None
