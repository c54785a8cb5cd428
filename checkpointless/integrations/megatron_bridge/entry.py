"""Bridge's entry points, which recover from faults inside a block."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import logging
import os
import queue
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron.bridge.data import loaders
from megatron.bridge.training import pretrain as bridge
from megatron.bridge.training import setup, train

from checkpointless.inprocess import UnrecoverableError, active_call_wrapper
from checkpointless.integrations.compat import BRIDGE, CORE, installed, untested
from checkpointless.integrations.compat import megatron as compat
from checkpointless.integrations.compat.megatron import queues_of_writers
from checkpointless.integrations.megatron import cleanup, cpu_platform
from checkpointless.integrations.megatron_bridge.generation import BridgeGeneration
from checkpointless.system.environment import RANK_ENV
from checkpointless.system.patches import Patch, Patches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron.bridge.training.callbacks import Callback, CallbackManager
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.forward_step_func_types import ForwardStepCallable

    from checkpointless.integrations.megatron_bridge.generation import BridgeGeneration

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
    reason = _refusal(config)
    if reason is not None:
        raise UnrecoverableError(reason)
    strange = untested(installed((BRIDGE, CORE)))
    if strange is not None and call.is_first and os.environ.get(RANK_ENV, "0") == "0":
        logger.warning("%s; `checkpointless rehearse` shows whether a training with them is exact", strange)
    if cpu_platform.requested():
        cpu_platform.install()  # with what Bridge needs, now that it is imported
    cleanup.install()
    config = _copied(config)
    with _entered(BridgeGeneration(call, config, state)):
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


@dataclass(frozen=True)
class _Refusal:
    setting: str  # its path below the configuration
    why: str  # what checkpointless cannot do with it
    instead: str  # what to set
    refused: Callable[[Any], bool] = bool  # whether a value of it is refused


def _is_given(value: object) -> bool:
    return value is not None


_FSDP = "does not know the shards of Megatron's FSDP", "use_megatron_fsdp=False"
_TWICE = "cannot start its detector twice"
_REFUSALS = (
    _Refusal("inprocess_restart.enabled", "shares a process with no other restart", "inprocess_restart=None"),
    _Refusal("ft.enable_ft_package", "shares a process with no other watchdog", "ft=None"),
    _Refusal("dist.use_megatron_fsdp", *_FSDP),
    _Refusal("ddp.use_megatron_fsdp", *_FSDP),
    _Refusal("dist.use_torch_fsdp2", "does not know Bridge's shards of FSDP2", "use_torch_fsdp2=False"),
    _Refusal(
        "dist.use_decentralized_pg",
        "finds replicas by Megatron's parallel state, which it leaves out",
        "use_decentralized_pg=False",
    ),
    _Refusal("dist.lazy_init", "has no process groups to find replicas by", "lazy_init=False"),
    _Refusal("peft", "has not been tried with Bridge's PEFT", "peft=None", _is_given),
    _Refusal(
        "dataset.dataloader_type",
        "does not know the position of an external data loader",
        "dataloader_type='single', 'cyclic' or 'batch'",
        lambda value: value == "external",
    ),
    _Refusal("train.iterations_to_skip", "counts no iteration without an update", "iterations_to_skip=[]"),
    _Refusal("model.qk_clip", "cannot guard parameters that change after the update", "qk_clip=False"),
    _Refusal("model.dist_train.use_dist_train", "finds replicas by one parallel state", "use_dist_train=False"),
    _Refusal(
        "model.moe_expert_rank_capacity_factor",
        "does not know a step that Bridge computes twice",
        "moe_expert_rank_capacity_factor=None",
        _is_given,
    ),
    _Refusal(
        "optimizer.optimizer",
        "cannot guard an optimizer that communicates in its step",
        "optimizer='adam' or 'sgd'",
        lambda value: value is not None and value not in _GUARDED,
    ),
    _Refusal("optimizer.optimizer_cuda_graph", "cannot guard an update in a graph", "optimizer_cuda_graph=False"),
    _Refusal(
        "rerun_state_machine.rerun_mode",
        "does not carry the statistics of determinism",
        "rerun_mode='disabled' or 'validate_results'",
        lambda value: value == "report_determinism_stats",
    ),
    _Refusal("rerun_state_machine.error_injection_rate", "repeats no injected error", "error_injection_rate=0"),
    _Refusal("checkpoint.async_save", "does not go on with Bridge's background saves", "async_save=False"),
    _Refusal("straggler.log_straggler", _TWICE, "log_straggler=False"),
    _Refusal("nvrx_straggler.enabled", _TWICE, "nvrx_straggler=None"),
    _Refusal("tensor_inspect.enabled", "does not carry what it collects", "tensor_inspect=None"),
    _Refusal("profiling.use_pytorch_profiler", "cannot start a profiler twice", "use_pytorch_profiler=False"),
)


def _refusal(config: ConfigContainer) -> str | None:
    """Return in one line why a training with ``config`` cannot be recovered exactly, and what to set; or None."""
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


Call = functools.partial[Any]  # of a function of Bridge's, with its arguments
_patches = Patches()
_running: list[BridgeGeneration] = []  # one at most


@contextmanager
def _entered(generation: BridgeGeneration) -> Iterator[None]:
    """Have Bridge's seams lead to ``generation`` while the context lasts."""
    if not _patches.are_made:
        _patches.make(_rows())
    _running[:] = [generation]
    try:
        yield
    finally:
        _running.clear()


def _rows() -> list[Patch]:
    required = [
        Patch(bridge, "setup", _setup, "tells Bridge's global state, of which there is a new one at each entry"),
        Patch(setup, "setup_optimizer", _setup_optimizer, "gives their state back to what was just made"),
        Patch(setup, "setup_data_iterators", _setup_data_iterators, "positions the data where training resumes"),
        Patch(loaders, "build_train_valid_test_data_loaders", _build_loaders, "tells the streams' order"),
        Patch(loaders, "build_pretraining_data_loader", _build_loader, "seeds workers by the batch"),
        Patch(loaders, "cyclic_iter", _cyclic_iter, "begins in the middle of a pass"),
        Patch(bridge, "train", _train, "adds what happens when training and a step start"),
        Patch(train, "train_step", _train_step, "notes the outcome of a step, or gives it once more"),
        Patch(train, "training_log", _training_log, "has what was added up before a fault"),
    ]
    of_some_versions = [
        Patch(setup, "load_checkpoint", _load_checkpoint, "storage is not asked for what memory had"),
        Patch(setup, "_should_load_checkpoint", _should_load_checkpoint, "as load_checkpoint, which is elsewhere"),
        Patch(bridge, "_cleanup_after_pretrain_failure", _clean_up, "the block cleans up, and keeps the state"),
    ]
    queues = [
        Patch(module, name, _results_queue, "no process is there to be interrupted")
        for module, name in queues_of_writers()
    ]
    for row in required:
        if not hasattr(row.target, row.attribute):
            seen = untested(installed((BRIDGE, CORE))) or "this Megatron-Bridge"
            place = f"{getattr(row.target, '__name__', row.target)}.{row.attribute}"
            raise UnrecoverableError(f"{seen}: there is no {place}, without which nothing can be recovered")
    return [*required, *(row for row in of_some_versions if hasattr(row.target, row.attribute)), *queues]


def _in_a_block(act: Callable[[BridgeGeneration, Call], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes the replacement of a function of Bridge's: ``act`` in a block, itself outside."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            call = functools.partial(original, *args, **kwargs)
            return act(_running[0], call) if _running else call()

        return replaced

    return make


_signature = functools.cache(inspect.signature)


def _named(call: Call) -> Mapping[str, Any]:
    return _signature(call.func).bind(*call.args, **call.keywords).arguments


@_in_a_block
def _setup(generation: BridgeGeneration, call: Call) -> Any:
    generation.begin(_named(call)["state"])
    return call()


@_in_a_block
def _setup_optimizer(generation: BridgeGeneration, call: Call) -> Any:
    made = call()
    generation.recover(_named(call)["model"], made)
    return made


@_in_a_block
def _load_checkpoint(generation: BridgeGeneration, call: Call) -> Any:
    return None if generation.recovered else call()


@_in_a_block
def _should_load_checkpoint(generation: BridgeGeneration, call: Call) -> bool:
    return not generation.recovered and bool(call())


@_in_a_block
def _results_queue(generation: BridgeGeneration, call: Call) -> Any:
    """Return a queue of this process for what writers of a save report.

    Megatron's is in a separate process. A rank that is interrupted while it talks to that takes the old answer for
    that to its next question. Saves are not made in the background here, so a queue of this process does.
    """
    return queue.Queue()


@_in_a_block
def _clean_up(generation: BridgeGeneration, call: Call) -> None:
    """Do nothing: the block cleans up."""


@_in_a_block
def _setup_data_iterators(generation: BridgeGeneration, call: Call) -> Any:
    return generation.build_data(call)


@_in_a_block
def _build_loaders(generation: BridgeGeneration, call: Call) -> Any:
    if generation.loaders is not None:
        generation.loaders.begin_build()
    return call()


@_in_a_block
def _build_loader(generation: BridgeGeneration, call: Call) -> Any:
    loader = call()
    if generation.loaders is not None:
        generation.loaders.made(loader, _named(call).get("data_parallel_rank", 0))
    return loader


@_in_a_block
def _cyclic_iter(generation: BridgeGeneration, call: Call) -> Any:
    return call() if generation.loaders is None else generation.loaders.passes(*call.args)


@_in_a_block
def _train(generation: BridgeGeneration, call: Call) -> Any:
    result = call(callback_manager=generation.callbacks(_named(call).get("callback_manager")))
    generation.end()
    return result


@_in_a_block
def _train_step(generation: BridgeGeneration, call: Call) -> Any:
    return generation.train_step(call.func, _named(call))


@_in_a_block
def _training_log(generation: BridgeGeneration, call: Call) -> Any:
    generation.log(_named(call)["total_loss_dict"])
    return call()
