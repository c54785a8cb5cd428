"""A training whose loop is Bridge's or Megatron-LM's: its state, and what is done at each seam of the loop."""

from __future__ import annotations

import functools
import inspect
import logging
import queue
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from typing_extensions import override

from checkpointless.faults.inject import WorkersIterator
from checkpointless.inprocess import HPCallWrapper, StateLostError, UnrecoverableError
from checkpointless.inprocess.abort import register_trainer_parts
from checkpointless.integrations.compat import BRIDGE, CORE, installed, untested
from checkpointless.integrations.compat import megatron as compat
from checkpointless.integrations.megatron.pretrain_loaders import STREAMS, Loaders
from checkpointless.integrations.megatron.state import MegatronTensors
from checkpointless.integrations.megatron.training import MegatronTraining
from checkpointless.integrations.megatron.update import GuardedUpdate, NotedNorms, announce_gradient_sync
from checkpointless.integrations.torch.loop import JournaledTraining
from checkpointless.integrations.torch.repeated_steps import repeated_steps
from checkpointless.recovery.guard import UpdateGuard
from checkpointless.state.journal import Captured
from checkpointless.state.port import SnapshotPoint
from checkpointless.system.patches import Patch, Patches

STEP, TRAIN, VALID = "step", "consumed_train_samples", "consumed_valid_samples"
_Losses = Sequence[Mapping[str, torch.Tensor]]
logger = logging.getLogger(__name__)


class _Training(JournaledTraining):
    """A training whose loop is Megatron-Bridge's or Megatron-LM's; a step of the engine is an iteration, from 1.

    Its state is kept at ``COMMITTED``, when the update is applied and nothing after it has happened, and at
    ``CHECKED``, when the next iteration begins. What lies between (scheduler, counters, logging, validation, save)
    is replayed if training resumes at the first: forward, backward and update return what they did before
    (``replayed``).
    """

    _how_to_get_replicas = MegatronTraining._how_to_get_replicas

    def __init__(
        self,
        call: HPCallWrapper,
        chunks: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        library: PretrainGeneration,
        declared: Mapping[str, Any],
    ) -> None:
        self._tensors = MegatronTensors(chunks, optimizer)
        super().__init__(self._tensors, call, [scheduler], declared)
        self._optimizer = optimizer
        self._update = GuardedUpdate(self._tensors, UpdateGuard(call, self._journal))
        self._library = library
        self._norms = NotedNorms(optimizer)
        self._losses: _Losses = []
        self._is_started = False
        self.replayed: Mapping[str, Any] | None = None
        self._totals: dict[str, Any] = {}  # added up since the library logged last; the library changes it
        self._kept_totals: Mapping[str, Any] = {}  # at the point that training resumed at
        self.began: dict[str, int] = {}
        self._objects = self._recover()
        self.recovered = self._objects is not None
        if self._objects is not None:
            self.step, self.began = self._objects["step"], dict(self._objects["began"])
            self._kept_totals = self._objects["totals"]

    # --- when the block is entered ----------------------------------------------------------------------------

    @override
    def _recover(self) -> dict[str, Any] | None:
        """Recover the state from memory; return None if there is none, or the library has it. Collective."""
        try:
            return super()._recover()
        except StateLostError as lost:
            if self._library.has_checkpoint():
                logger.error("%s: %s loads its own checkpoint", lost.reason, self._library.name)
            elif self._manager.allow_restart_from_scratch:
                logger.error("%s: starting over at step 0, as allow_restart_from_scratch allows", lost.reason)
            else:
                raise
            self._manager.delete_checkpoint()
            return None

    def put_counters(self) -> int:
        """Set the counters for the point to resume at; return how many training samples precede it."""
        library = self._library
        if self._objects is None:
            counters = library.counters()
            self.began = {"train": counters[TRAIN], "valid": counters[VALID]}
            return int(counters[TRAIN])
        counters = self._objects["counters"]
        library.set_counters(counters)
        consumed = int(counters[TRAIN])
        if self._manager.resumed_at == (self.step, SnapshotPoint.COMMITTED):
            own = self._manager.own.kept_at(self.step, SnapshotPoint.COMMITTED)
            if not own:
                raise UnrecoverableError(f"the outcome of step {self.step} of this rank is lost")
            self.replayed = own["outcome"]
            consumed += own["outcome"]["samples"]
        return consumed

    def start(self) -> None:
        """Begin the loop, once: the state is in place, and the random streams are put back. Collective."""
        if self._is_started:
            return
        self._is_started = True
        if self.recovered:
            self._manager.restore_streams()
        else:
            self.step = self._library.counters()[STEP]
            self._journal.begin(self.step, SnapshotPoint.LOADED)
        self._manager.attach(self._journal, self.step)
        self._call.steps.begin_data()

    # --- while training ---------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        announce_gradient_sync(self.state.modules[0], self._call)
        if self.replayed is not None:
            return
        self._journal.reached(self.step, SnapshotPoint.CHECKED)
        self._manager.make_copies(self.step)
        self._norms.forget()
        self._losses = []
        self._call.begin_step(self.step + 1)
        self._call.enter_phase("data", self.step + 1)

    def compute(self, original: Callable[..., _Losses], **arguments: Any) -> _Losses:
        """Run forward and backward, and note what they report of the step in the making; or give it once more."""
        if self.replayed is not None:
            return _losses_of(self.replayed["losses"])
        self._losses = original(**arguments)
        return self._losses

    def log(self, totals: dict[str, Any]) -> None:
        """Note what the library is about to add to; after a recovery, put back what was added up before."""
        totals.update(self._kept_totals)
        self._kept_totals = {}
        self._totals = totals

    def end_step(self, reduced: Mapping[str, torch.Tensor]) -> None:
        """Record the step; ``reduced`` are the losses to report, none before the last pipeline stage."""
        loss = (
            None if self._log is None else float(sum(map(float, reduced.values())))
        )  # which a device is asked for
        if self.replayed is not None:
            self._record(loss, once=True)
        elif self._call.parameter_update_lock.committed >= self._call.steps.making:
            self.step = self._call.steps.making
            if self._log is not None:
                self._tensors.gather(late=True)  # the next forward pass would come too late
            self._record(loss)
            self._call.end_step()
            self._call.enter_phase("between", self.step)
        self.replayed = None

    def end(self) -> None:
        """Make no more copies of this training, whose loop is over."""
        self._manager.copies.finish()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Let the optimizer's ``step`` change nothing but the streams meanwhile, if the step is replayed."""
        outcome = self.replayed
        if outcome is None:
            yield
            return

        def step() -> tuple[bool, float | None, float | None]:
            self._manager.restore_streams()
            return outcome["succeeded"], outcome["grad_norm"], outcome["num_zeros"]

        self._optimizer.step = step  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._optimizer.step

    # --- what the journal asks for --------------------------------------------------------------------------------

    @override
    def ready(self, step: int) -> Captured:
        losses, succeeded = _plain_losses(self._losses), not self._update.overflow
        values = [float(each.sum()) for _, each in losses.values()]
        repeated_steps.compute(step, sum(values) if values else None)
        outcome = {
            "losses": losses,
            "succeeded": succeeded,
            "grad_norm": self._norms.grad_norm if succeeded else None,
            "num_zeros": self._norms.num_zeros if succeeded else None,
            "samples": self._library.samples(),
        }
        return Captured(own={"outcome": outcome}, is_skipped=not succeeded)

    @override
    def reached(self, step: int, point: SnapshotPoint) -> Captured:
        return Captured(self._capture(step))

    @override
    def _capture(self, step: int) -> Callable[[], dict[str, Any]]:
        capture, counters, began = super()._capture(step), self._library.counters(), self.began
        totals = dict(self._kept_totals or self._totals)  # what is kept, until the library logs for the first time
        return lambda: {**capture(), "counters": counters, "totals": totals, "began": began}


def _plain_losses(losses: _Losses) -> dict[str, tuple[str, torch.Tensor]]:
    """Return by name device and values (1 or 2) of all microbatches; none before the last pipeline stage."""
    names = list(losses[0]) if losses else []
    stacked = {name: torch.stack([each[name].detach().view(-1) for each in losses]) for name in names}
    return {name: (tensor.device.type, tensor.cpu()) for name, tensor in stacked.items()}


def _losses_of(plain: Mapping[str, tuple[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    stacked = {name: tensor.to(device) for name, (device, tensor) in plain.items()}
    return [dict(zip(stacked, values)) for values in zip(*stacked.values())]


class PretrainGeneration(ABC):
    """One entry of ``pretrain`` in a block, and the library that has the loop, which a subclass knows."""

    name: ClassVar[str]  # the library's, for messages
    patches: ClassVar[Patches]  # the functions of the library that act as its own outside of a block
    refusals: ClassVar[Sequence[Refusal]]
    of_some_versions: ClassVar[Collection[str]] = ()  # the names of seams that a version may lack

    def __init__(self, call: HPCallWrapper, declared: Mapping[str, Any]) -> None:
        self.call = call
        self._declared = declared
        self._training: _Training | None = None
        self._loaders: Loaders | None = None
        self._iterators: list[tuple[str, Any]] = []

    # --- what a subclass knows of the library ---------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def seams(cls) -> Sequence[Seam]:
        """Return where the library is entered."""

    @staticmethod
    def seams_of_data(target: object, iterators: str, loaders: object) -> list[Seam]:
        """Return where a library makes its data: the function for the iterators of ``target``, and its loaders."""
        made, data = "build_train_valid_test_data_loaders", PretrainGeneration
        return [
            (target, iterators, data.build_data, "positions the data at the step"),
            (loaders, made, data.make_loaders, "seeds workers by the batch"),
            (loaders, "cyclic_iter", data.make_passes, "begins in the middle of a pass"),
        ]

    @property
    @abstractmethod
    def seed(self) -> int:
        """The seed of the job."""

    @property
    def takes_whole_batches(self) -> bool:
        """Whether the loop takes a step's batch before it computes the step."""
        return False

    @abstractmethod
    def has_checkpoint(self) -> bool:
        """Return whether the library will load a checkpoint."""

    @abstractmethod
    def counters(self) -> dict[str, Any]:
        """Return what the library counts, as plain data; of it :data:`STEP`, :data:`TRAIN` and :data:`VALID`."""

    @abstractmethod
    def set_counters(self, values: Mapping[str, Any]) -> None:
        """Set what :meth:`counters` returned, or a part of it."""

    @abstractmethod
    def samples(self) -> int:
        """Return how many samples a step takes, of all ranks."""

    @classmethod
    def refusal(cls, value: Callable[[str], object]) -> str | None:
        """Return in one line why a training with these settings (``value(name)``) is not exact; None: it is."""
        for each in cls.refusals:
            if each.refused(value(each.setting)):
                return f"{each.setting}: checkpointless {each.why}: set it to {each.instead}"
        return None

    # --- the seams ------------------------------------------------------------------------------------------------

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have the library's functions lead here meanwhile; ``UnrecoverableError`` if this version lacks one."""
        if not self.patches.are_made:
            patches = _of_writers()
            for target, name, act, why in self.seams():
                if hasattr(target, name):
                    patches.append(Patch(target, name, _in_a_block(act), why))
                elif name not in self.of_some_versions:
                    seen = untested(installed((BRIDGE, CORE))) or f"this {self.name}"
                    place = f"{getattr(target, '__name__', target)}.{name}"
                    raise UnrecoverableError(f"{seen}: there is no {place}, without which nothing can be recovered")
            self.patches.make(patches)
        _left.clear()
        _running[:] = [self]
        try:
            yield
        except BaseException:
            _left[:] = self.workers()
            raise
        finally:
            _running.clear()

    @property
    def training(self) -> _Training:
        assert self._training is not None
        return self._training

    @property
    def recovered(self) -> bool:
        """Whether model, optimizer and scheduler have their state from memory."""
        return self._training is not None and self._training.recovered

    def begin(self) -> None:
        self.call.enter_phase("init", self.call.high_water)

    def recover(
        self, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler
    ) -> None:
        """Recover what was made, before the library would load a checkpoint. Collective."""
        self.call.beat()
        self._training = _Training(self.call, chunks, optimizer, scheduler, self, self._declared)
        self.call.beat()

    def build_data(self, build: Call) -> Sequence[Any]:
        """Build the data iterators, positioned where training resumes."""
        training = self.training
        consumed = training.put_counters()
        before = self.counters()[TRAIN]
        self._loaders = Loaders(training.recovered, training.began, self.seed)
        if not training.recovered:
            return self._noted(build())
        update_num_microbatches(before, consistency_check=False)
        if not self.takes_whole_batches:
            self.set_counters({TRAIN: consumed})
        try:
            return self._noted(build())
        finally:
            self.set_counters({TRAIN: before})

    def _noted(self, built: Sequence[Any]) -> Sequence[Any]:
        """Note the iterators that were built for the streams, and let faults of data loaders find their workers."""
        for stream, of_stream in zip(STREAMS, built, strict=True):
            iterators = of_stream if isinstance(of_stream, list) else [of_stream]
            self._iterators += [(stream, each) for each in iterators]
        loaders, train = self._loaders, self._iterators[0][1]
        if self.call.faults is not None and loaders is not None and train is not None:
            found = weakref.ref(train)
            self.call.faults.batches = lambda: loaders.workers_of(found())
        return built

    def workers(self) -> list[WorkersIterator]:
        """Return torch's iterators with workers, of all streams."""
        if self._loaders is None:
            return []
        found = [self._loaders.workers_of(iterator, stream) for stream, iterator in self._iterators]
        return [each for each in found if each is not None]

    def make_loaders(self, make: Call) -> Sequence[Any]:
        made: Sequence[Any] = make()
        if self._loaders is not None:
            self._loaders.made(made)
        return made

    def make_passes(self, make: Call) -> Iterable[Any]:
        passes: Iterable[Any] = make() if self._loaders is None else self._loaders.passes(*make.args)
        return passes

    def train_step(self, step: Call) -> tuple[Any, ...]:
        """Make a step, or replay one whose update is applied."""
        training, arguments = self.training, step.arguments
        compute = functools.partial(training.compute, arguments["forward_backward_func"])
        forward = arguments["forward_step_func"]
        if self.call.faults is not None and training.replayed is None:
            forward = functools.partial(self._announced, forward)
        with training.replaying():
            result: tuple[Any, ...] = step.func(
                **{**arguments, "forward_step_func": forward, "forward_backward_func": compute}
            )
        training.end_step(result[0])
        return result

    def _announced(self, forward_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a forward step that announces the phases ``forward`` and ``backward``."""
        call = self.call
        call.enter_phase("forward", call.steps.making)
        output, loss = forward_step(*args, **kwargs)
        if output.requires_grad:  # on each pipeline stage; only the last one has a loss
            output.register_hook(lambda _: call.enter_phase("backward", call.steps.making))
        return output, loss


# --- the functions that lead to a generation ---------------------------------------------------------------------

_running: list[PretrainGeneration] = []  # one at most
_left: list[WorkersIterator] = []  # of a generation that has left the block, until its abort


class _Parts:
    """Finds the workers of the training, running or just left: in cycles, each would cost the collector 5 s."""

    def loader_iterators(self, trainer: object) -> list[Any]:
        return [*_left, *(each for generation in _running for each in generation.workers())]

    def stop_saves(self, trainer: object) -> None:
        """Do nothing: saves in the background are refused."""


register_trainer_parts("pretrain", _Parts())
_signature = functools.cache(inspect.signature)


class Call(functools.partial[Any]):
    """A call of a function of the library."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments by name."""
        return _signature(self.func).bind(*self.args, **self.keywords).arguments


#: Where a library is entered: an object and the name of its function, what is done there in a block, and why.
Seam = tuple[object, str, Callable[[Any, Call], Any], str]


def _in_a_block(act: Callable[[Any, Call], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes a replacement: in a block ``act`` is done, given the generation and the original call."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            call = Call(original, *args, **kwargs)
            return act(_running[0], call) if _running else call()

        return replaced

    return make


def _of_writers() -> list[Patch]:
    """Make writers report to a queue of this process: a rank interrupted in a question would get its old answer."""
    make, why = _in_a_block(lambda *_: queue.Queue()), "no process is there to be interrupted"
    return [Patch(module, name, make, why) for module, name in compat.queues_of_writers()]


# --- settings of a library that are refused --------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """One setting that is refused, if ``refused(value)``: what cannot be done with it, and what to set it to."""

    setting: str
    why: str
    instead: str = "False"
    refused: Callable[[Any], bool] = bool


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
    Refusal(
        "moe_expert_rank_capacity_factor",
        "does not know a step that is computed twice",
        "None",
        lambda value: value is not None,
    ),
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
