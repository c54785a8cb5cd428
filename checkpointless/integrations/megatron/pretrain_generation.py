"""One entry of ``pretrain`` in a block: what is done at each seam of the loop, Bridge's or Megatron-LM's."""

from __future__ import annotations

import functools
import inspect
import queue
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from megatron.core.num_microbatches_calculator import update_num_microbatches

from checkpointless.faults.inject import WorkersIterator
from checkpointless.inprocess import HPCallWrapper, UnrecoverableError
from checkpointless.inprocess.abort import register_trainer_parts
from checkpointless.integrations.compat import BRIDGE, CORE, installed, untested
from checkpointless.integrations.compat import megatron as compat
from checkpointless.integrations.megatron.pretrain_loaders import STREAMS, Loaders
from checkpointless.integrations.megatron.pretraining import TRAIN, Pretraining, Trainer
from checkpointless.integrations.megatron.update import announce_gradient_sync
from checkpointless.system.patches import Patch, Patches

_Built = TypeVar("_Built")
_Loaders = TypeVar("_Loaders", bound=Sequence[Any])


class PretrainGeneration:
    """One entry of ``pretrain`` in a block.

    Args:
        call: the running wrapper.
        declared: the declared state, by name.

    Attributes:
        call: the running wrapper.
        trainer: the port to the library; None: its setup has not begun.
        training: the training; None: model and optimizer have not been made.
        loaders: the data loaders; None: they are not being built yet.
        chunks: the model's chunks, once they are made.
    """

    def __init__(self, call: HPCallWrapper, declared: Mapping[str, Any]) -> None:
        self.call = call
        self._declared = declared
        self.trainer: Trainer | None = None
        self.training: Pretraining | None = None
        self.loaders: Loaders | None = None
        self.chunks: Sequence[torch.nn.Module] = ()
        self._iterators: list[tuple[str, Any]] = []
        self._is_started = False

    def begin(self, trainer: Trainer) -> None:
        """Begin the setup."""
        self.trainer = trainer
        self.call.enter_phase("init", self.call.high_water)

    def recover(self, chunks: Sequence[torch.nn.Module], made: tuple[Any, Any]) -> None:
        """Recover what was made, before the library would load a checkpoint. Collective.

        Args:
            chunks: the model's chunks.
            made: optimizer and scheduler.
        """
        assert self.trainer is not None
        self.call.beat()
        optimizer, scheduler = made
        self.training = Pretraining(self.call, chunks, optimizer, scheduler, self.trainer, self._declared)
        self.training.recover()
        self.call.beat()

    @property
    def is_started(self) -> bool:
        """Whether the loop has begun."""
        return self._is_started

    @property
    def recovered(self) -> bool:
        """Whether model, optimizer and scheduler have their state from memory."""
        return self.training is not None and self.training.recovered

    def build_data(self, build: Callable[[], _Built]) -> _Built:
        """Build the data iterators, positioned where training resumes.

        Args:
            build: the library's function, with its arguments.

        Returns:
            What ``build`` returned.
        """
        assert self.trainer is not None
        assert self.training is not None
        training, trainer = self.training, self.trainer
        if not training.recovered:
            training.note_counters()
            self.loaders = Loaders(False, training.began, trainer.seed)
            return self._noted(build())
        consumed = training.put_counters()
        before = trainer.counters()[TRAIN]
        update_num_microbatches(before, consistency_check=False)
        self.loaders = Loaders(True, training.began, trainer.seed)
        if not trainer.takes_whole_batches:
            trainer.set_counters({TRAIN: consumed})
        try:
            return self._noted(build())
        finally:
            trainer.set_counters({TRAIN: before})

    def _noted(self, built: _Built) -> _Built:
        """Note the iterators that were built for the streams, and let faults of data loaders find their workers."""
        for stream, of_stream in zip(STREAMS, cast(Sequence[Any], built), strict=True):
            iterators = of_stream if isinstance(of_stream, list) else [of_stream]
            self._iterators += [(stream, each) for each in iterators]
        loaders, train = self.loaders, self._iterators[0][1]
        if self.call.faults is not None and loaders is not None and train is not None:
            found = weakref.ref(train)
            self.call.faults.batches = lambda: loaders.workers_of(found())
        return built

    def workers(self) -> list[WorkersIterator]:
        """Return torch's iterators with workers, of all streams."""
        if self.loaders is None:
            return []
        found = [self.loaders.workers_of(iterator, stream) for stream, iterator in self._iterators]
        return [each for each in found if each is not None]

    def seeded(self, made: _Loaders) -> _Loaders:
        """Return the loaders that were made for the streams, whose workers draw by the batch."""
        if self.loaders is not None:
            self.loaders.made(made)
        return made

    def train_step(self, original: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """Make a step, or replay one whose update is applied.

        Args:
            original: the library's ``train_step``.
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
        """Note what is added up to log; after a recovery, put back what was added up before.

        Args:
            totals: what the library is about to add to.
        """
        training = self.training
        assert training is not None
        if training.kept_totals:
            totals.update(training.kept_totals)
            training.kept_totals = {}
        training.totals = totals

    def end(self) -> None:
        """End the loop; what follows it is not training."""
        assert self.training is not None
        self.training.end()

    def start(self) -> None:
        """Begin the loop."""
        assert self.training is not None
        self._is_started = True
        self.training.start()

    def begin_step(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Begin an iteration.

        Args:
            chunks: the model's chunks.
        """
        assert self.training is not None
        announce_gradient_sync(chunks[0], self.call)
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


# --- the functions that lead to a generation ---------------------------------------------------------------------

Call = functools.partial[Any]  # of a function of the library, with its arguments
_running: list[PretrainGeneration] = []  # one at most


_left: list[WorkersIterator] = []  # of a generation that has left the block, until its abort


class _Parts:
    """Finds the data-loader workers of the training that runs, or has just been left, whatever the trainer.

    Their iterators are in reference cycles, in which torch waits five seconds for each worker: the garbage
    collector has ended the thread that would ask the worker to end before it calls the iterator's destructor.
    """

    def loader_iterators(self, trainer: object) -> list[Any]:
        return [*_left, *(each for generation in _running for each in generation.workers())]

    def stop_saves(self, trainer: object) -> None:
        """Do nothing: saves in the background are refused."""


register_trainer_parts("pretrain", _Parts())
_signature = functools.cache(inspect.signature)


class Seams:
    """Functions of one library that are replaced, and act as its own outside of a block.

    Args:
        library: its name.
        rows: returns the replacements without which nothing can be recovered, and those of some versions only.
    """

    def __init__(self, library: str, rows: Callable[[], tuple[list[Patch], list[Patch]]]) -> None:
        self._library = library
        self._rows = rows
        self._patches = Patches()

    @contextmanager
    def entered(self, generation: PretrainGeneration) -> Iterator[None]:
        """Have the functions lead to ``generation`` while the context lasts.

        Raises:
            UnrecoverableError: this version of the library lacks one of them.
        """
        if not self._patches.are_made:
            required, of_some_versions = self._rows()
            for row in required:
                if not hasattr(row.target, row.attribute):
                    seen = untested(installed((BRIDGE, CORE))) or f"this {self._library}"
                    place = f"{getattr(row.target, '__name__', row.target)}.{row.attribute}"
                    raise UnrecoverableError(f"{seen}: there is no {place}, without which nothing can be recovered")
            present = [row for row in of_some_versions if hasattr(row.target, row.attribute)]
            self._patches.make([*required, *present, *_of_writers()])
        _left.clear()
        _running[:] = [generation]
        try:
            yield
        except BaseException:
            _left[:] = generation.workers()
            raise
        finally:
            _running.clear()


def in_a_block(
    act: Callable[[PretrainGeneration, Call], Any],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes the replacement of a function, which stays what it is outside of a block.

    Args:
        act: what is done in a block, given the generation and the call of the original.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            call = functools.partial(original, *args, **kwargs)
            return act(_running[0], call) if _running else call()

        return replaced

    return make


def of_data(target: object, iterators: str, loaders: object) -> list[Patch]:
    """Return the replacements of the functions with which a library makes its data.

    Args:
        target: where its iterators are made.
        iterators: the name of the function that makes them.
        loaders: where its loaders are made.
    """
    made = "build_train_valid_test_data_loaders"
    return [
        Patch(target, iterators, in_a_block(PretrainGeneration.build_data), "positions the data at the step"),
        Patch(loaders, made, in_a_block(lambda to, call: to.seeded(call())), "seeds workers by the batch"),
        Patch(loaders, "cyclic_iter", in_a_block(_cyclic_iter), "begins in the middle of a pass"),
    ]


def _cyclic_iter(generation: PretrainGeneration, call: Call) -> Any:
    return call() if generation.loaders is None else generation.loaders.passes(*call.args)


def _of_writers() -> list[Patch]:
    """Return what makes the writers of a save report to a queue of this process.

    A rank that is interrupted while it talks to the process of Megatron's queue would take the old answer for that
    to its next question. Saves are not made in the background here.
    """
    make, why = in_a_block(lambda *_: queue.Queue()), "no process is there to be interrupted"
    return [Patch(module, name, make, why) for module, name in compat.queues_of_writers()]


def arguments_of(call: Call) -> Mapping[str, Any]:
    """Return the arguments of a call by name."""
    return _signature(call.func).bind(*call.args, **call.keywords).arguments


# --- settings of a library that are refused --------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """One setting that is refused.

    Attributes:
        setting: its name.
        why: what checkpointless cannot do with it.
        instead: what to set it to.
        refused: whether a value of it is refused.
    """

    setting: str
    why: str
    instead: str = "False"
    refused: Callable[[Any], bool] = bool


def is_given(value: object) -> bool:
    """Return whether a setting is not None."""
    return value is not None


def first_refusal(refusals: Iterable[Refusal], value: Callable[[str], object]) -> str | None:
    """Return why a training cannot be recovered exactly, in one line that says what to set; None if it can be.

    Args:
        value: returns the value of a setting; None if this version does not know it.
    """
    for each in refusals:
        if each.refused(value(each.setting)):
            return f"{each.setting}: checkpointless {each.why}: set it to {each.instead}"
    return None


#: What Megatron-LM and Bridge have in common, by the names of Megatron-LM's arguments.
REFUSALS = (
    Refusal("inprocess_restart", "shares a process with no other restart"),
    Refusal("enable_ft_package", "shares a process with no other watchdog"),
    Refusal("use_megatron_fsdp", "does not know the shards of Megatron's FSDP"),
    Refusal("use_torch_fsdp2", "does not know Megatron's shards of FSDP2"),
    Refusal(
        "dataloader_type",
        "does not know the position of an external data loader",
        "'single' or 'cyclic'",
        lambda value: value == "external",
    ),
    Refusal("iterations_to_skip", "counts no iteration without an update", "none"),
    Refusal("moe_expert_rank_capacity_factor", "does not know a step that is computed twice", "None", is_given),
    Refusal("qk_clip", "cannot guard parameters that change after the update"),
    Refusal(
        "optimizer",
        "cannot guard an optimizer that communicates in its step",
        "'adam' or 'sgd'",
        lambda value: value not in (None, "adam", "sgd"),
    ),
    Refusal("optimizer_cuda_graph", "cannot guard an update in a graph"),
    Refusal(
        "rerun_mode",
        "does not carry the statistics of determinism",
        "'disabled' or 'validate_results'",
        lambda value: value == "report_determinism_stats",
    ),
    Refusal("error_injection_rate", "repeats no injected error", "0"),
    Refusal("async_save", "does not go on with background saves"),
    Refusal("log_straggler", "cannot start its detector twice"),
    Refusal("use_pytorch_profiler", "cannot start a profiler twice"),
)
