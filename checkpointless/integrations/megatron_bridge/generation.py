"""One generation of a training of Megatron-Bridge: what is done at each of Bridge's seams."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from megatron.bridge.training.callbacks import CallbackContext, CallbackManager
from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.utils import get_model_config
from typing_extensions import override

from checkpointless.inprocess import HPCallWrapper
from checkpointless.integrations.megatron_bridge.data import Loaders
from checkpointless.integrations.megatron_bridge.training import BridgeTraining

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.state import GlobalState

_Built = TypeVar("_Built")


class BridgeGeneration:
    """One entry of ``pretrain`` in a block.

    Args:
        call: the running wrapper.
        config: the configuration of this entry.
        declared: the declared state, by name.

    Attributes:
        call: the running wrapper.
        state: Bridge's global state; None: its setup has not begun.
        training: the training; None: model and optimizer have not been made.
        loaders: the data loaders; None: they are not being built yet.
    """

    def __init__(self, call: HPCallWrapper, config: ConfigContainer, declared: Mapping[str, Any]) -> None:
        self.call = call
        self._config = config
        self._declared = declared
        self.state: GlobalState | None = None
        self.training: BridgeTraining | None = None
        self.loaders: Loaders | None = None

    def begin(self, state: GlobalState) -> None:
        """Begin the setup."""
        self.state = state
        self.call.enter_phase("init", self.call.high_water)

    def recover(self, chunks: list[torch.nn.Module], made: tuple[Any, Any]) -> None:
        """Recover what was made, before Bridge would load a checkpoint. Collective.

        Args:
            chunks: the model's chunks.
            made: optimizer and scheduler.
        """
        assert self.state is not None
        self.call.beat()
        optimizer, scheduler = made
        self.training = BridgeTraining(self.call, chunks, optimizer, scheduler, self.state, self._declared)
        self.training.recover(lambda: bool(checkpoint_exists(self._config.checkpoint.load)))
        self.call.beat()

    @property
    def recovered(self) -> bool:
        """Whether model, optimizer and scheduler have their state from memory."""
        return self.training is not None and self.training.recovered

    def build_data(self, build: Callable[[], _Built]) -> _Built:
        """Build the data iterators, positioned where training resumes.

        Args:
            build: Bridge's function, with its arguments.

        Returns:
            What ``build`` returned.
        """
        assert self.state is not None
        assert self.training is not None
        training, train_state = self.training, self.state.train_state
        if not training.recovered:
            training.note_counters()
            self.loaders = Loaders(False, training.began, self._config.rng.seed)
            return self._known_to_faults(build())
        consumed = training.put_counters()
        before = train_state.consumed_train_samples
        update_num_microbatches(before, consistency_check=False)
        self.loaders = Loaders(True, training.began, self._config.rng.seed)
        if self._config.dataset.dataloader_type != "batch":  # Bridge takes whole batches before it computes a step
            train_state.consumed_train_samples = consumed
        try:
            return self._known_to_faults(build())
        finally:
            train_state.consumed_train_samples = before

    def _known_to_faults(self, built: _Built) -> _Built:
        """Let faults of data loaders find the workers of the iterators that Bridge has built."""
        loaders, iterators = self.loaders, cast(Sequence[Any], built)
        if self.call.faults is not None and loaders is not None and iterators and iterators[0] is not None:
            train = weakref.ref(iterators[0][0] if isinstance(iterators[0], list) else iterators[0])
            self.call.faults.batches = lambda: loaders.workers_of(train())
        return built

    def train_step(self, original: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """Make a step, or go through one again whose update is applied.

        Args:
            original: Bridge's ``train_step``.
            arguments: its arguments by name.
        """
        training = self.training
        assert training is not None
        compute = arguments["forward_backward_func"]
        outcome = training.replayed
        if outcome is not None:
            losses = list(outcome.losses)
            with training.replay(outcome):
                result = original(**{**arguments, "forward_backward_func": lambda **_: losses})
        else:

            def noted(**kwargs: Any) -> Any:
                reduced = compute(**kwargs)
                training.note(reduced)
                return reduced

            announced = self._announced(arguments["forward_step_func"])
            result = original(
                **{**arguments, "forward_step_func": announced, "forward_backward_func": noted},
            )
        training.end_step(result[0])
        return result

    def log(self, totals: dict[str, Any]) -> None:
        """Note what Bridge adds up to log; after a recovery, put back what was added up before.

        Args:
            totals: what Bridge is about to add to.
        """
        training = self.training
        assert training is not None
        if training.kept_totals:
            totals.update(training.kept_totals)
            training.kept_totals = {}
        training.totals = totals

    def callbacks(self, inner: CallbackManager | None) -> CallbackManager:
        """Return the user's callbacks, with what happens in addition when training and a step start."""
        return Callbacks(inner, self)

    def end(self) -> None:
        """End the loop; what Bridge does after it is not training."""
        assert self.training is not None
        self.training.end()

    def start(self) -> None:
        """Begin the loop."""
        assert self.training is not None
        self.training.start()

    def begin_step(self, context: CallbackContext) -> None:
        """Begin an iteration."""
        assert self.training is not None
        self._announce_gradient_sync(context.model)
        self.training.begin_step()

    def _announced(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward step that announces the phases ``forward`` and ``backward``, if there are faults."""
        call = self.call
        if call.faults is None:
            return forward_step

        def announced(*args: Any, **kwargs: Any) -> Any:
            call.enter_phase("forward", call.steps.making)
            output, loss = forward_step(*args, **kwargs)
            if output.requires_grad:  # on each pipeline stage; only the last one has a loss
                output.register_hook(lambda _: call.enter_phase("backward", call.steps.making))
            return output, loss

        return announced

    def _announce_gradient_sync(self, chunks: list[torch.nn.Module]) -> None:
        """Announce the phase ``sync`` before gradients are reduced, if there are faults."""
        call, config = self.call, get_model_config(chunks[0])
        finalize = config.finalize_model_grads_func
        if call.faults is None or finalize is None or hasattr(finalize, "announces"):
            return

        def announced(*args: Any, **kwargs: Any) -> Any:
            call.enter_phase("sync", call.steps.making)
            return finalize(*args, **kwargs)

        announced.announces = True  # type: ignore[attr-defined]
        config.finalize_model_grads_func = announced


class Callbacks(CallbackManager):  # type: ignore[misc]
    """A user's callbacks, and what happens before them when a step starts and after them when training starts.

    Args:
        inner: the user's callbacks; None: there are none.
        generation: the generation.
    """

    def __init__(self, inner: CallbackManager | None, generation: BridgeGeneration) -> None:
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
            self._generation.begin_step(context)
        self._inner.fire(event_name, context)
        if event_name == "on_train_start":
            self._generation.start()
