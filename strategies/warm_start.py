"""Gives NeMo's set-up the model that was kept over a fault, where everything is as it was before."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.utils import get_model_config
from nemo.collections.llm.gpt.model.base import GPTModel
from nemo.collections.llm.peft.lora import LoRA
from nemo.lightning import io
from nemo.lightning.pytorch.callbacks import PEFT
from nemo.lightning.pytorch.strategies import MegatronStrategy

from checkpointless.inprocess.communicators.launch_bound import LaunchBound
from checkpointless.inprocess.wrap import emit_event
from checkpointless.integrations.megatron.warm import KeptModel, fingerprints
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.recovery import CheckpointManager
from checkpointless.state.rng import RngStates
from checkpointless.transfer.exchange import true_on_all


class WarmStart:
    """The set-up of one fit by a Megatron strategy, whose process groups are built and nothing else."""

    def __init__(self, strategy: MegatronStrategy) -> None:
        self._strategy: Any = strategy
        self._kept: KeptModel | None = None
        self._everywhere = False
        self._streams = RngStates.capture().without_sources()
        self._left = RngStates()
        self._obstacle = _obstacle(strategy)
        self._plans = _plans(strategy) if self._obstacle is None else {}
        self._noted: list[dict[str, Any]] = []  # by virtual pipeline stage
        if self._obstacle is None:
            strategy.lightning_module.configure_model = partial(self._configure, strategy.lightning_module)

    @property
    def is_warm(self) -> bool:
        return self._kept is not None

    def agree(self, manager: CheckpointManager | None) -> None:
        """Take what ``manager`` keeps for this fit, if it fits, and notify the other ranks. Collective."""
        found, reason = manager.kept if manager is not None else None, ""
        if manager is not None and found is not None and found[0] == manager.fits.number + 1:
            kept = cast("KeptModel", found[1])
            begun, self._left = kept.streams
            reason = self._obstacle or kept.mismatch(self._plans) or kept.unfit() or ""
            if not reason and not self._streams.same_streams(begun):
                reason = "random numbers were drawn otherwise before"
            self._kept = None if reason else kept
        self._everywhere = true_on_all(self.is_warm)
        if self._kept is not None and not self._everywhere and self._kept.builds_together:
            reason = "another rank builds its model, and exchanges weights meanwhile"
        if reason and manager is not None:
            manager.kept = self._kept = None
            self._left = RngStates()
            emit_event(EventName.WARM, kept=False, reason=reason)

    def _configure(self, module: Any, vp_stage: int | None = None) -> None:
        """Stand in for ``configure_model`` of the next virtual stage: have it build, unless it is kept."""
        vars(module).pop("configure_model", None)
        values = vars(module.config)
        if self._kept is not None:
            noted = self._kept.noted[len(self._noted)]
            values.update(noted)
            if not self._everywhere:
                self._kept.take_part(len(self._noted), module.config.params_dtype)
        else:
            before = dict(values)
            module.configure_model(vp_stage=vp_stage)
            noted = {name: value for name, value in values.items() if value is not before.get(name, before)}
        self._noted.append(noted)

    @contextmanager
    def _stages(self) -> Iterator[None]:
        """Have NeMo, which copies the module for each further virtual pipeline stage, find those built, too."""
        original, own = io.reinit, threading.get_ident()

        def reinit(module: Any) -> Any:
            made: Any = original(module)
            if threading.get_ident() != own:
                return made  # it copies something else
            made.configure_model = partial(self._configure, made)
            if self._kept is not None:
                _put(self._kept.chunks[len(self._noted)], made)
            return made

        io.reinit = reinit if self._obstacle is None else original
        try:
            yield
        finally:
            io.reinit = original

    @contextmanager
    def build(self) -> Iterator[None]:
        """Have NeMo find everything built that was kept, while it builds model and optimizer in the context."""
        kept = self._kept
        if kept is None:
            with self._stages():
                yield
            self._left = RngStates.capture()
            return
        began_s = time.monotonic()
        _put(kept.chunks[0], self._strategy.lightning_module)
        replaced = kept.bind()
        emit_event(
            EventName.WARM,
            kept=True,
            everywhere=self._everywhere,
            references=replaced,
            seconds=time.monotonic() - began_s,
        )
        plugin = self._strategy.precision_plugin
        if hasattr(plugin, "convert_module"):
            plugin.convert_module = self._convert
        try:
            with kept.in_place_of_new(self._everywhere), self._stages():
                yield
            self._left.restore()  # a model that is built draws its first weights
        finally:
            vars(plugin).pop("convert_module", None)

    @contextmanager
    def add_adapters(self, peft: PEFT) -> Iterator[None]:
        """Have NeMo's callback find adapters and optimizer in place that were kept, while it adds them."""
        kept = self._kept
        if kept is None:
            yield
            return
        counted: Any = peft.model_transform
        peft.model_transform = _leave_as_it_is
        try:
            with kept.in_place_of_new(self._everywhere):
                yield
        finally:
            peft.model_transform = counted
        counted.__num_calls__ += 1  # else they are added when the first epoch begins
        peft.params_to_save = set(kept.saved)  # DDP, which is in place already, has other names for them

    def _convert(self, module: Any) -> Any:
        """Do what a precision plugin does to a model besides wrapping it, which is done."""
        dtypes = getattr(self._strategy.precision_plugin, "dtype_config", None)
        if dtypes is not None and (dtypes.fp16 or dtypes.bf16):
            config = get_model_config(module.module)
            config.fp16, config.bf16 = dtypes.fp16, dtypes.bf16
        return module

    @property
    def bound(self) -> LaunchBound | None:
        """What bounds the launches of the model that was kept; None: nothing, or no model was kept."""
        return self._kept.bound if self._kept is not None else None

    def built(self, bound: LaunchBound | None) -> object:
        """Return what is built now, for the next fault; ``bound``: what bounds the launches of its layers."""
        if self._obstacle is not None:
            return SimpleNamespace(unfit=partial(str, self._obstacle))
        strategy = self._strategy
        chunks = [chunk.module for chunk in strategy.megatron_parallel]
        optimizer, streams = strategy.optimizers[0].mcore_optimizer, (self._streams, self._left)
        saved = self._kept.saved if self._kept is not None else _saved(strategy)
        return KeptModel(chunks, optimizer, self._plans, streams, self._noted, bound, saved)


def _put(chunk: Any, module: Any) -> None:
    """Put a chunk that was kept into a new module that would build it, with the functions of the new trainer."""
    config = get_model_config(chunk)
    vars(config).update(vars(module.config))
    module.config = config
    module.module = chunk


def _obstacle(strategy: Any) -> str | None:
    """Return why the model that ``strategy`` is about to build cannot be one that was kept; None: it can."""
    module = strategy.lightning_module
    for each in (module, *module.trainer.callbacks):
        if _acts_before_the_restore(each):
            return f"on_fit_start of {type(each).__name__} would find a trained model"
    if getattr(type(module), "configure_model", None) is not GPTModel.configure_model:
        return f"it is not known how {type(module).__name__} builds its model"
    if hasattr(module, "module"):
        return "the model was built before the fit"
    transform = module.model_transform
    added = any(each is transform for each in module.trainer.callbacks)
    if transform is not None and not (added and type(transform) is LoRA):
        return f"it is not known how {type(transform).__name__} changes the model"
    if module.model_context_managers:
        return "the model is built in contexts of its own"
    if not isinstance(strategy.ddp_config, DistributedDataParallelConfig):
        return "the model is not in Megatron's DistributedDataParallel"
    return None


def _acts_before_the_restore(part: object) -> bool:
    """Return whether a callback or module of the user's acts between the set-up of a model and its restore."""
    hook = getattr(part, "on_fit_start", None)  # LambdaCallback has it in an attribute of its own
    return not getattr(hook, "__module__", "").startswith(
        ("lightning.", "pytorch_lightning.", "nemo.", "checkpointless.")
    )


def _plans(strategy: Any) -> dict[str, dict[str, object]]:
    """Return fingerprints of the configurations that decide how model and optimizer are built."""
    module, plugin = strategy.lightning_module, strategy.precision_plugin
    optim = module.optim
    rules = {name: getattr(optim, name, None) for name in ("no_weight_decay_cond", "scale_lr_cond", "lr_mult")}
    dtypes = getattr(plugin, "dtype_config", None)
    values = {
        "model": vars(module.config),
        "optimizer": {"class": type(optim), **rules, **vars(optim.config)},
        "DistributedDataParallel": vars(strategy.ddp_config),
        "precision": {"class": type(plugin), "types": dtypes},
        "virtual stages": vars(io.reinit(module).config) if strategy.virtual_pipeline_model_parallel_size else {},
        "adapters": _settings(module.model_transform) if module.model_transform is not None else {},
        "tokenizer": {"class": type(module.tokenizer), "size": getattr(module.tokenizer, "vocab_size", None)},
    }
    # The other names are a framework's notes of how a configuration was made.
    return {
        what: fingerprints({name: value for name, value in each.items() if not name.startswith("__")})
        for what, each in values.items()
    }


def _settings(transform: LoRA) -> dict[str, object]:
    """Return what decides which adapters are added: the rest of the callback changes while they are."""
    return {field.name: getattr(transform, field.name) for field in dataclasses.fields(transform)}


def _saved(strategy: Any) -> Collection[str]:
    """Return the names of the parameters that are saved as adapters, which are in place but not wrapped yet."""
    callbacks = strategy.lightning_module.trainer.callbacks
    return next((each.params_to_save for each in callbacks if isinstance(each, PEFT)), ())


def _leave_as_it_is(model: object) -> None:
    """Stand in for what adds adapters, where they are in place."""
