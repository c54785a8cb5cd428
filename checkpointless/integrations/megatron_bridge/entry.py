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

_GUARDED = ("adam", "sgd")
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


_FSDP = "does not know the shards of Megatron's FSDP", "use_megatron_fsdp=False"
_TWICE = "cannot start its detector twice"
_REFUSALS = (
    Refusal("inprocess_restart.enabled", "shares a process with no other restart", "inprocess_restart=None"),
    Refusal("ft.enable_ft_package", "shares a process with no other watchdog", "ft=None"),
    Refusal("dist.use_megatron_fsdp", *_FSDP),
    Refusal("ddp.use_megatron_fsdp", *_FSDP),
    Refusal("dist.use_torch_fsdp2", "does not know Bridge's shards of FSDP2", "use_torch_fsdp2=False"),
    Refusal(
        "dist.use_decentralized_pg",
        "finds replicas by Megatron's parallel state, which it leaves out",
        "use_decentralized_pg=False",
    ),
    Refusal("dist.lazy_init", "has no process groups to find replicas by", "lazy_init=False"),
    Refusal("peft", "has not been tried with Bridge's PEFT", "peft=None", is_given),
    Refusal(
        "dataset.dataloader_type",
        "does not know the position of an external data loader",
        "dataloader_type='single', 'cyclic' or 'batch'",
        lambda value: value == "external",
    ),
    Refusal("train.iterations_to_skip", "counts no iteration without an update", "iterations_to_skip=[]"),
    Refusal("model.qk_clip", "cannot guard parameters that change after the update", "qk_clip=False"),
    Refusal("model.dist_train.use_dist_train", "finds replicas by one parallel state", "use_dist_train=False"),
    Refusal(
        "model.moe_expert_rank_capacity_factor",
        "does not know a step that Bridge computes twice",
        "moe_expert_rank_capacity_factor=None",
        is_given,
    ),
    Refusal(
        "optimizer.optimizer",
        "cannot guard an optimizer that communicates in its step",
        "optimizer='adam' or 'sgd'",
        lambda value: value is not None and value not in _GUARDED,
    ),
    Refusal("optimizer.optimizer_cuda_graph", "cannot guard an update in a graph", "optimizer_cuda_graph=False"),
    Refusal(
        "rerun_state_machine.rerun_mode",
        "does not carry the statistics of determinism",
        "rerun_mode='disabled' or 'validate_results'",
        lambda value: value == "report_determinism_stats",
    ),
    Refusal("rerun_state_machine.error_injection_rate", "repeats no injected error", "error_injection_rate=0"),
    Refusal("checkpoint.async_save", "does not go on with Bridge's background saves", "async_save=False"),
    Refusal("straggler.log_straggler", _TWICE, "log_straggler=False"),
    Refusal("nvrx_straggler.enabled", _TWICE, "nvrx_straggler=None"),
    Refusal("tensor_inspect.enabled", "does not carry what it collects", "tensor_inspect=None"),
    Refusal("profiling.use_pytorch_profiler", "cannot start a profiler twice", "use_pytorch_profiler=False"),
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
