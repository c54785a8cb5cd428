"""One generation of a training of Megatron-Bridge: what is done at each of Bridge's seams."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from megatron.bridge.data.samplers import MegatronPretrainingBatchSampler, MegatronPretrainingRandomSampler
from megatron.bridge.training.callbacks import CallbackContext, CallbackManager
from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.utils import get_model_config
from typing_extensions import override

from checkpointless.inprocess import HPCallWrapper
from checkpointless.inprocess.worker_streams import Place, seed_data_workers
from checkpointless.integrations.compat import megatron as compat
from checkpointless.integrations.megatron_bridge.training import BridgeTraining

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.state import GlobalState
    from torch.utils.data import DataLoader

    from checkpointless.faults.inject import WorkersIterator

_Built = TypeVar("_Built")


class BridgeGeneration:
    """One entry of ``pretrain`` in a block, with its configuration and the declared state by name."""

    def __init__(self, call: HPCallWrapper, config: ConfigContainer, declared: Mapping[str, Any]) -> None:
        self.call = call
        self._config = config
        self._declared = declared
        self.state: GlobalState | None = None  # since setup has begun
        self.training: BridgeTraining | None = None  # since model and optimizer have been made
        self.loaders: _Loaders | None = None  # since they are being built

    def begin(self, state: GlobalState) -> None:
        """Begin the setup."""
        self.state = state
        self.call.enter_phase("init", self.call.high_water)

    def recover(self, chunks: list[torch.nn.Module], made: tuple[Any, Any]) -> None:
        """Recover model, optimizer and scheduler, before Bridge would load a checkpoint. Collective."""
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
        """Build the data iterators with Bridge's ``build``, positioned where training resumes."""
        assert self.state is not None
        assert self.training is not None
        training, train_state = self.training, self.state.train_state
        if not training.recovered:
            training.note_counters()
            self.loaders = _Loaders(False, training.began, self._config.rng.seed)
            return self._known_to_faults(build())
        consumed = training.put_counters()
        before = train_state.consumed_train_samples
        update_num_microbatches(before, consistency_check=False)
        self.loaders = _Loaders(True, training.began, self._config.rng.seed)
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
            result = original(**{**arguments, "forward_step_func": announced, "forward_backward_func": noted})
        training.end_step(result[0])
        return result

    def log(self, totals: dict[str, Any]) -> None:
        """Note what Bridge adds up to log; after a recovery, put back what was added up before."""
        training = self.training
        assert training is not None
        if training.kept_totals:
            totals.update(training.kept_totals)
            training.kept_totals = {}
        training.totals = totals

    def callbacks(self, inner: CallbackManager | None) -> CallbackManager:
        """Return the user's callbacks, with what happens in addition when training and a step start."""
        return _Callbacks(inner, self)

    def end(self) -> None:
        """End the loop; what Bridge does after it is not training."""
        assert self.training is not None
        self.training.end()

    def happen(self, event_name: str, context: CallbackContext) -> None:
        """Do what happens when training and a step start."""
        assert self.training is not None
        if event_name == "on_train_start":
            self.training.start()
        elif event_name == "on_train_step_start":
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


class _Callbacks(CallbackManager):  # type: ignore[misc]
    """A user's callbacks, and what happens before them when a step starts and after them when training starts."""

    def __init__(self, inner: CallbackManager | None, generation: BridgeGeneration) -> None:
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
            self._generation.happen(event_name, context)
        self._inner.fire(event_name, context)
        if event_name == "on_train_start":
            self._generation.happen(event_name, context)


# --- Bridge's data loaders, positioned so that a training that resumes takes the batches that it would have taken -

#: The streams of samples, in the order in which Bridge builds their loaders.
_STREAMS = ("train", "valid", "test")


class _Passes:
    """Iterates over a loader again and again, as Bridge does, from the batch that follows those consumed.

    Bridge makes an iterator when the first batch is asked for, and torch draws a number from the training's stream
    for it. If the loader is in the middle of a pass, that iterator was made before the fault: here it is made at
    once, before the streams are put back. The sampler of whole batches of Bridge 0.3 would begin every further pass
    where the first one has resumed; here it begins where the training once began. That of Bridge 0.6 counts on.
    """

    def __init__(self, loader: DataLoader[Any], began: int) -> None:
        self._loader = loader
        self._sampler: Any = getattr(loader, "batch_sampler", None)
        self._began = began
        # Workers that persist (the default of Bridge 0.6) have one iterator for all passes.
        is_begun = getattr(self._sampler, "consumed_samples", began) > began
        self._was_made = is_begun and bool(getattr(loader, "persistent_workers", False))
        self._counts_on = compat.samples_of_a_pass(self._sampler)
        self.number = self._find_place()  # of passes before the one under way; workers ask for it when they start
        self._first: Iterator[Any] | None = None
        self._workers: Callable[[], WorkersIterator | None] = lambda: None

    def resume(self) -> None:
        """Go on with a pass that is under way, if one is, or with an iterator that was there before the fault."""
        if self._is_inside_a_pass or self._was_made:
            self._first = self._begin_pass()

    def __iter__(self) -> Iterator[Any]:
        while True:
            iterator = self._begin_pass() if self._first is None else self._first
            self._first = None
            yield from iterator
            del iterator
            self._end_pass()

    @property
    def batches(self) -> WorkersIterator | None:
        """Torch's iterator over the pass under way; None if it has no workers."""
        return self._workers()

    def _begin_pass(self) -> Iterator[Any]:
        iterator = iter(self._loader)
        if hasattr(iterator, "_workers"):
            self._workers = weakref.ref(cast("WorkersIterator", iterator))
        else:
            self._workers = lambda: None
        return iterator

    def _find_place(self) -> int:
        """Have the first pass begin where it must, and return how many passes precede it."""
        sampler = self._sampler
        self._is_inside_a_pass = False
        if isinstance(sampler, MegatronPretrainingRandomSampler):
            return self._counted(sampler.consumed_samples, sampler.total_samples - sampler.last_batch_size)[0]
        if not isinstance(sampler, MegatronPretrainingBatchSampler):
            return 0
        if self._counts_on is not None:
            return self._counted(sampler.consumed_samples, self._counts_on)[0]
        size = sampler._global_batch_size
        taken = (sampler.consumed_samples - self._began) // size
        sampler.consumed_samples = self._began
        number, batch = self._counted(taken, len(sampler))
        sampler.consumed_samples = self._began % sampler.total_samples + batch * size
        return number

    def _counted(self, taken: int, whole: int) -> tuple[int, int]:
        """Return how many passes are ``taken`` and how far the next is, and note whether it is under way."""
        number, inside = divmod(taken, max(whole, 1))
        self._is_inside_a_pass = inside > 0
        return int(number), int(inside)

    def _end_pass(self) -> None:
        self.number += 1
        if isinstance(self._sampler, MegatronPretrainingBatchSampler) and self._counts_on is None:
            self._sampler.consumed_samples = self._began


class _Loaders:
    """The data loaders of one generation; ``began``: the samples of each stream consumed when training began."""

    def __init__(self, resumes: bool, began: Mapping[str, int], seed: int) -> None:
        self._resumes = resumes
        self._began = began
        self._seed = seed
        self._names: Iterator[str] = iter(())
        self._made: list[tuple[DataLoader[Any], str]] = []
        self._passes: dict[str, _Passes] = {}

    def begin_build(self) -> None:
        """Note that Bridge builds the loaders now, those of the streams in their order."""
        self._names = iter(_STREAMS)

    def made(self, loader: DataLoader[Any] | None, rank: int) -> None:
        """Make what the workers of the next stream's loader, if any, draw depend on the batch alone.

        It must not depend on how long a worker has lived. ``rank`` is the data-parallel rank.
        """
        name = next(self._names)
        if loader is None:
            return
        self._made.append((loader, name))

        def place() -> Place:
            return Place(self._passes[name].number if name in self._passes else 0)

        seed_data_workers(loader, self._seed, rank=rank, stream=name, place=place)

    def passes(self, loader: DataLoader[Any]) -> _Passes:
        """Return what iterates over ``loader`` again and again."""
        name = next((name for each, name in self._made if each is loader), "")
        self._passes[name] = passes = _Passes(loader, self._began.get(name, 0))
        if self._resumes:
            passes.resume()
        return passes

    def workers_of(self, iterator: object) -> WorkersIterator | None:
        """Return torch's iterator with workers inside Bridge's over the training data; None if it has none now."""
        inner = getattr(iterator, "iterable", None)
        if hasattr(inner, "_workers"):
            return cast("WorkersIterator", inner)
        passes = self._passes.get(_STREAMS[0])
        return None if passes is None else passes.batches
