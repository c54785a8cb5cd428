"""Recovery for trainings with Megatron-Bridge: ``checkpointless.bridge`` has its public names."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from checkpointless.integrations.megatron import cpu_platform

if cpu_platform.requested():
    cpu_platform.install()

# After the platform, without which these fail on CPUs.
# isort: split
from megatron.bridge.data import loaders
from megatron.bridge.training import pretrain as bridge
from megatron.bridge.training import setup, train
from megatron.bridge.training.callbacks import CallbackContext, CallbackManager
from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists
from megatron.core.num_microbatches_calculator import get_num_microbatches

from checkpointless.inprocess import UnrecoverableError, active_call_wrapper
from checkpointless.integrations.compat import BRIDGE, CORE, installed, untested
from checkpointless.integrations.compat import megatron as compat
from checkpointless.integrations.megatron import cleanup
from checkpointless.integrations.megatron.pretraining import REFUSALS, Call, PretrainGeneration, Refusal, Seam
from checkpointless.system.environment import RANK_ENV
from checkpointless.system.patches import Patches

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.forward_step_func_types import ForwardStepCallable
    from megatron.bridge.training.state import GlobalState

__all__ = ["finetune", "pretrain"]
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
    reason = _Bridge.refusal(partial(_value, config))
    if reason is not None:
        raise UnrecoverableError(reason)
    strange = untested(installed((BRIDGE, CORE)))
    if strange is not None and call.is_first and os.environ.get(RANK_ENV, "0") == "0":
        logger.warning("%s; `checkpointless rehearse` shows whether a training with them is exact", strange)
    cleanup.install()
    with _Bridge(call, state).entered():
        bridge.pretrain(_copied(config), forward_step_func, callbacks)


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
    if hasattr(config, compat.CHECKPOINT_REQUIRED):
        setattr(config, compat.CHECKPOINT_REQUIRED, True)
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


# --- Settings of Megatron-Bridge that are refused, and its seams -------------------------------------------------


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


class _Bridge(PretrainGeneration):
    """An entry of Bridge's ``pretrain`` or ``finetune``."""

    name = "Megatron-Bridge"
    patches = Patches()
    refusals = (
        *(dataclasses.replace(each, setting=_PATHS[each.setting]) for each in REFUSALS),
        Refusal("ddp.use_megatron_fsdp", "does not know the shards of Megatron's FSDP"),
        Refusal("dist.use_decentralized_pg", "finds replicas by Megatron's parallel state, which it leaves out"),
        Refusal("dist.lazy_init", "has no process groups to find replicas by"),
        Refusal("peft", "has not been tried with Bridge's PEFT", "None", lambda value: value is not None),
        Refusal("model.dist_train.use_dist_train", "finds replicas by one parallel state"),
        Refusal("nvrx_straggler.enabled", "cannot start its detector twice"),
        Refusal("tensor_inspect.enabled", "does not carry what it collects"),
    )
    _state: GlobalState  # there is a new one at each entry

    of_some_versions = ("load_checkpoint", "_should_load_checkpoint", "_cleanup_after_pretrain_failure")

    @classmethod
    @override
    def seams(cls) -> list[Seam]:
        return [
            (bridge, "setup", cls._setup, "has Bridge's global state"),
            (setup, "setup_optimizer", cls._setup_optimizer, "gives their state back to what was just made"),
            (setup, "load_checkpoint", cls._load_checkpoint, "storage is not asked for what memory had"),
            (setup, "_should_load_checkpoint", cls._load_checkpoint, "as load_checkpoint, which is elsewhere"),
            *cls.seams_of_data(setup, "setup_data_iterators", loaders),
            (bridge, "train", cls._train, "adds what happens when training and a step start"),
            (train, "train_step", cls.train_step, "notes the outcome of a step, or gives it once more"),
            (train, "training_log", cls._training_log, "has what was added up before a fault"),
            (
                bridge,
                "_cleanup_after_pretrain_failure",
                lambda *_: None,
                "the block cleans up, and keeps the state",
            ),
        ]

    @property
    @override
    def seed(self) -> int:
        return int(self._state.cfg.rng.seed)

    @property
    @override
    def takes_whole_batches(self) -> bool:
        return bool(self._state.cfg.dataset.dataloader_type == "batch")

    @override
    def has_checkpoint(self) -> bool:
        return bool(checkpoint_exists(self._state.cfg.checkpoint.load))

    @override
    def counters(self) -> dict[str, Any]:
        train_state = self._state.train_state
        return {field.name: getattr(train_state, field.name) for field in dataclasses.fields(train_state)}

    @override
    def set_counters(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._state.train_state, name, value)

    @override
    def samples(self) -> int:
        cfg = self._state.cfg
        return int(get_num_microbatches() * cfg.train.micro_batch_size * cfg.data_parallel_size)

    def _setup(self, call: Call) -> Any:
        self._state = call.arguments["state"]
        self.begin()
        return call()

    def _setup_optimizer(self, call: Call) -> Any:
        made = call()
        self.recover(call.arguments["model"], *made)
        return made

    def _load_checkpoint(self, call: Call) -> Any:
        return None if self.recovered else call()

    def _train(self, call: Call) -> Any:
        result = call(callback_manager=_Callbacks(call.arguments.get("callback_manager"), self))
        self.training.end()
        return result

    def _training_log(self, call: Call) -> Any:
        self.training.log(call.arguments["total_loss_dict"])
        return call()


class _Callbacks(CallbackManager):  # type: ignore[misc]
    """A user's callbacks, and what happens before them when a step starts and after them when training starts."""

    def __init__(self, inner: CallbackManager | None, generation: _Bridge) -> None:
        super().__init__()
        self._inner = inner if inner is not None else CallbackManager()
        self._generation = generation

    @property
    def user_state(self) -> dict[str, Any]:
        shared: dict[str, Any] = self._inner.user_state
        return shared

    @override
    def has_callbacks(self, event_name: str) -> bool:
        return event_name in ("on_train_start", "on_train_step_start") or self._inner.has_callbacks(event_name)

    @override
    def fire(self, event_name: str, context: CallbackContext) -> None:
        if event_name == "on_train_step_start":
            self._generation.training.begin_step()
        self._inner.fire(event_name, context)
        if event_name == "on_train_start":
            self._generation.training.start()


def _value(config: object, setting: str) -> object:
    """Return the value of a setting; None where a part of its path is None or not known to this version."""
    try:
        return attrgetter(setting)(config)
    except AttributeError:
        return None
