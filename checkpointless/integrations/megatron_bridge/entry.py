"""Bridge's entry points, which recover from faults inside a block."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron.bridge.training import pretrain as bridge

from checkpointless.inprocess import UnrecoverableError, active_call_wrapper
from checkpointless.integrations.megatron import cleanup, cpu_platform
from checkpointless.integrations.megatron_bridge.generation import BridgeGeneration
from checkpointless.integrations.megatron_bridge.seams import entered

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks import Callback, CallbackManager
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.forward_step_func_types import ForwardStepCallable

_GUARDED = ("adam", "sgd")


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


# --- Settings of Megatron-Bridge that are refused -----------------------------------------------------------------


@dataclass(frozen=True)
class _Refusal:
    """One setting that is refused.

    Attributes:
        setting: path of the setting below the configuration.
        refused: whether a value of it is refused.
        why: what checkpointless cannot do with it.
        instead: what to set.
    """

    setting: str
    refused: Callable[[Any], bool]
    why: str
    instead: str


_REFUSALS = (
    _Refusal("inprocess_restart.enabled", bool, "shares a process with no other restart", "inprocess_restart=None"),
    _Refusal("ft.enable_ft_package", bool, "shares a process with no other watchdog", "ft=None"),
    _Refusal(
        "dist.use_megatron_fsdp", bool, "does not know the shards of Megatron's FSDP", "use_megatron_fsdp=False"
    ),
    _Refusal(
        "ddp.use_megatron_fsdp", bool, "does not know the shards of Megatron's FSDP", "use_megatron_fsdp=False"
    ),
    _Refusal("dist.use_torch_fsdp2", bool, "does not know Bridge's shards of FSDP2", "use_torch_fsdp2=False"),
    _Refusal(
        "dist.use_decentralized_pg",
        bool,
        "finds replicas by Megatron's parallel state, which it leaves out",
        "use_decentralized_pg=False",
    ),
    _Refusal("dist.lazy_init", bool, "has no process groups to find replicas by", "lazy_init=False"),
    _Refusal("peft", lambda value: value is not None, "has not been tried with Bridge's PEFT", "peft=None"),
    _Refusal(
        "dataset.dataloader_type",
        lambda value: value == "external",
        "does not know the position of an external data loader",
        "dataloader_type='single', 'cyclic' or 'batch'",
    ),
    _Refusal("train.iterations_to_skip", bool, "counts no iteration without an update", "iterations_to_skip=[]"),
    _Refusal("model.qk_clip", bool, "cannot guard parameters that change after the update", "qk_clip=False"),
    _Refusal(
        "optimizer.optimizer",
        lambda value: value is not None and value not in _GUARDED,
        "cannot guard an optimizer that communicates in its step",
        "optimizer='adam' or 'sgd'",
    ),
    _Refusal(
        "rerun_state_machine.rerun_mode",
        lambda value: value == "report_determinism_stats",
        "does not carry the statistics of determinism",
        "rerun_mode='disabled' or 'validate_results'",
    ),
    _Refusal(
        "rerun_state_machine.error_injection_rate", bool, "repeats no injected error", "error_injection_rate=0"
    ),
    _Refusal("checkpoint.async_save", bool, "does not go on with Bridge's background saves", "async_save=False"),
    _Refusal("straggler.log_straggler", bool, "cannot start its detector twice", "log_straggler=False"),
    _Refusal("nvrx_straggler.enabled", bool, "cannot start its detector twice", "nvrx_straggler=None"),
    _Refusal("tensor_inspect.enabled", bool, "does not carry what it collects", "tensor_inspect=None"),
    _Refusal("profiling.use_pytorch_profiler", bool, "cannot start a profiler twice", "use_pytorch_profiler=False"),
)


def refusal(config: ConfigContainer) -> str | None:
    """Return why a training with ``config`` cannot be recovered exactly.

    Args:
        config: the configuration that is given to ``pretrain``.

    Returns:
        One line that says what to set; None if there is no obstacle.
    """
    for each in _REFUSALS:
        if each.refused(_value(config, each.setting)):
            return f"{each.setting}: checkpointless {each.why}: set {each.instead}"
    return None


def _value(config: object, setting: str) -> object:
    """Return the value of a setting; None where a part of its path is None or not known to this version."""
    try:
        return attrgetter(setting)(config)
    except AttributeError:
        return None
