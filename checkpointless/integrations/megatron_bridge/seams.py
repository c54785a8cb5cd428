"""Where Megatron-Bridge is entered: each function that is replaced acts as Bridge's own outside of a block."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.bridge.data import loaders
from megatron.bridge.training import pretrain, setup, train
from megatron.bridge.training.callbacks import CallbackContext, CallbackManager
from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists
from megatron.core.num_microbatches_calculator import get_num_microbatches
from typing_extensions import override

from checkpointless.integrations.megatron.pretrain_generation import (
    Call,
    PretrainGeneration,
    Seams,
    arguments_of,
    in_a_block,
    of_data,
)
from checkpointless.system.patches import Patch

if TYPE_CHECKING:
    from megatron.bridge.training.state import GlobalState


class _BridgeTrainer:
    """Bridge, as :class:`~checkpointless.integrations.megatron.pretraining.Trainer`.

    Args:
        state: Bridge's global state.
    """

    name = "Bridge"

    def __init__(self, state: GlobalState) -> None:
        self._state = state

    @property
    def seed(self) -> int:
        return int(self._state.cfg.rng.seed)

    @property
    def takes_whole_batches(self) -> bool:
        return bool(self._state.cfg.dataset.dataloader_type == "batch")

    def has_checkpoint(self) -> bool:
        return bool(checkpoint_exists(self._state.cfg.checkpoint.load))

    def counters(self) -> dict[str, Any]:
        train_state = self._state.train_state
        return {field.name: getattr(train_state, field.name) for field in dataclasses.fields(train_state)}

    def set_counters(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._state.train_state, name, value)

    def samples(self) -> int:
        cfg = self._state.cfg
        return int(get_num_microbatches() * cfg.train.micro_batch_size * cfg.data_parallel_size)


def _rows() -> tuple[list[Patch], list[Patch]]:
    required = [
        Patch(pretrain, "setup", _setup, "has Bridge's global state, of which there is a new one at each entry"),
        Patch(setup, "setup_optimizer", _setup_optimizer, "gives their state back to what was just made"),
        *of_data(setup, "setup_data_iterators", loaders),
        Patch(pretrain, "train", _train, "adds what happens when training and a step start"),
        Patch(train, "train_step", _train_step, "notes the outcome of a step, or gives it once more"),
        Patch(train, "training_log", _training_log, "has what was added up before a fault"),
    ]
    of_some_versions = [
        Patch(setup, "load_checkpoint", _load_checkpoint, "storage is not asked for what memory had"),
        Patch(setup, "_should_load_checkpoint", _should_load_checkpoint, "as load_checkpoint, which is elsewhere"),
        Patch(pretrain, "_cleanup_after_pretrain_failure", _clean_up, "the block cleans up, and keeps the state"),
    ]
    return required, of_some_versions


SEAMS = Seams("Megatron-Bridge", _rows)


@in_a_block
def _setup(generation: PretrainGeneration, call: Call) -> Any:
    generation.begin(_BridgeTrainer(arguments_of(call)["state"]))
    return call()


@in_a_block
def _setup_optimizer(generation: PretrainGeneration, call: Call) -> Any:
    made = call()
    generation.recover(arguments_of(call)["model"], made)
    return made


@in_a_block
def _load_checkpoint(generation: PretrainGeneration, call: Call) -> Any:
    return None if generation.recovered else call()


@in_a_block
def _should_load_checkpoint(generation: PretrainGeneration, call: Call) -> bool:
    return not generation.recovered and bool(call())


@in_a_block
def _clean_up(generation: PretrainGeneration, call: Call) -> None:
    """Do nothing: the block cleans up."""


@in_a_block
def _train(generation: PretrainGeneration, call: Call) -> Any:
    result = call(callback_manager=_Callbacks(arguments_of(call).get("callback_manager"), generation))
    generation.end()
    return result


@in_a_block
def _train_step(generation: PretrainGeneration, call: Call) -> Any:
    return generation.train_step(call.func, arguments_of(call))


@in_a_block
def _training_log(generation: PretrainGeneration, call: Call) -> Any:
    generation.log(arguments_of(call)["total_loss_dict"])
    return call()


class _Callbacks(CallbackManager):  # type: ignore[misc]
    """A user's callbacks, and what happens before them when a step starts and after them when training starts.

    Args:
        inner: the user's callbacks; None: there are none.
        generation: the generation.
    """

    def __init__(self, inner: CallbackManager | None, generation: PretrainGeneration) -> None:
        super().__init__()
        self._inner = inner if inner is not None else CallbackManager()
        self._generation = generation

    @property
    def user_state(self) -> dict[str, Any]:
        """What the user's callbacks share."""
        shared: dict[str, Any] = self._inner.user_state
        return shared

    @override
    def has_callbacks(self, event_name: str) -> bool:
        """Return whether something happens at an event."""
        return event_name in ("on_train_start", "on_train_step_start") or self._inner.has_callbacks(event_name)

    @override
    def fire(self, event_name: str, context: CallbackContext) -> None:
        """Do what happens at an event."""
        if event_name == "on_train_step_start":
            self._generation.begin_step(context.model)
        self._inner.fire(event_name, context)
        if event_name == "on_train_start":
            self._generation.start()
