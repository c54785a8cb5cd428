"""The state of a training whose loop is Bridge's or Megatron-LM's: how steps are recorded, kept and replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from typing_extensions import override

from checkpointless.inprocess import HPCallWrapper, StateLostError, UnrecoverableError
from checkpointless.integrations.megatron.state import MegatronTensors
from checkpointless.integrations.megatron.training import MegatronTraining
from checkpointless.integrations.megatron.update import GuardedUpdate, NotedNorms, gather_parameters, sub_optimizers
from checkpointless.integrations.torch.loop import JournaledTraining
from checkpointless.integrations.torch.loop_state import LoopState
from checkpointless.integrations.torch.repeated_steps import repeated_steps
from checkpointless.recovery.guard import UpdateGuard
from checkpointless.state.journal import Captured
from checkpointless.state.port import SnapshotPoint

Losses = Sequence[Mapping[str, torch.Tensor]]
logger = logging.getLogger(__name__)


class Trainer(Protocol):
    """The port to the library that has the loop.

    Attributes:
        name: the library, for messages.
        seed: the seed of the job.
        takes_whole_batches: whether the loop takes a step's batch before it computes the step.
    """

    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def takes_whole_batches(self) -> bool: ...

    def has_checkpoint(self) -> bool:
        """Return whether the library will load a checkpoint."""

    def counters(self) -> dict[str, Any]:
        """Return what the library counts, as plain data; of it :data:`STEP`, :data:`TRAIN` and :data:`VALID`."""

    def set_counters(self, values: Mapping[str, Any]) -> None:
        """Set what :meth:`counters` returned, or a part of it."""

    def samples(self) -> int:
        """Return how many samples a step takes, of all ranks."""


STEP, TRAIN, VALID = "step", "consumed_train_samples", "consumed_valid_samples"


class Pretraining(JournaledTraining):
    """A training whose loop is Megatron-Bridge's or Megatron-LM's, as the recovery sees it.

    The library has the loop. A step of the engine is an iteration of the loop, counted from 1. Its state is kept at
    two points: ``COMMITTED``, when the update is applied and nothing that follows it has happened, and ``CHECKED``,
    when the next iteration begins. What lies between (the scheduler's step, counters, logging, a validation, a
    save) is replayed if training resumes at the first: the loop repeats the step, and forward, backward and
    update return what they returned before.

    Args:
        call: the running wrapper. Its ``checkpoint_manager`` is used; if there is none, one is made.
        chunks: the model's chunks.
        optimizer: Megatron's optimizer.
        scheduler: the scheduler of learning rate and weight decay.
        trainer: the port to the library.
        declared: what callbacks and the forward step change from step to step, by name.

    Raises:
        UnrecoverableError: the update cannot be guarded, or the state cannot be carried over.

    Attributes:
        recovered: whether the state was recovered from memory in this generation.
        replayed: the outcome of the committed step that is replayed; None: the next step is computed.
        totals: what the library has added up since it logged last, by name; the library changes it.
        kept_totals: what had been added up when the point was taken that training resumed at.
        began: for each stream of samples how many were consumed when the training began.
    """

    _how_to_get_replicas = MegatronTraining._how_to_get_replicas

    def __init__(
        self,
        call: HPCallWrapper,
        chunks: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        trainer: Trainer,
        declared: Mapping[str, Any],
    ) -> None:
        super().__init__(MegatronTensors(chunks, optimizer), call, [scheduler], LoopState(declared))
        self._optimizer = optimizer
        self._update = GuardedUpdate(optimizer, chunks, UpdateGuard(call, self._journal))
        self._trainer = trainer
        self._norms = NotedNorms(optimizer)
        self._losses: Losses = []
        self._objects: Mapping[str, Any] = {}
        self.recovered = False
        self.replayed: _StepOutcome | None = None
        self.totals: dict[str, Any] = {}
        self.kept_totals: Mapping[str, Any] = {}
        self.began: dict[str, int] = {}

    # --- when the block is entered ----------------------------------------------------------------------------

    def recover(self) -> None:
        """Recover model, optimizer and scheduler from memory, if there is something to recover. Collective.

        Raises:
            UnrecoverableError: steps were committed, and neither memory nor storage holds them.
        """
        call, manager = self._call, self._manager
        if call.generation == 0:
            return
        call.enter_phase("recovery", call.high_water)
        objects = manager.recover(self._journal)
        if objects is not None:
            self.recovered, self._objects, self.step = True, objects, objects["step"]
            self.kept_totals, self.began = objects["totals"], dict(objects["began"])
            return
        if call.high_water <= 0:
            return
        reason = manager.refusal or "no rank holds the state in memory"
        if self._trainer.has_checkpoint():
            logger.error("%s: %s loads its own checkpoint", reason, self._trainer.name)
        elif manager.allow_restart_from_scratch:
            logger.error("%s: starting over at step 0, as allow_restart_from_scratch allows", reason)
        else:
            raise StateLostError(reason)
        manager.delete_checkpoint()

    def note_counters(self) -> None:
        """Note the counters that the training begins with."""
        counters = self._trainer.counters()
        self.began = {"train": counters[TRAIN], "valid": counters[VALID]}

    def put_counters(self) -> int:
        """Set the counters to their values at the point that training resumes at.

        Returns:
            The number of training samples that precede the batch to take next.
        """
        counters = self._objects["counters"]
        self._trainer.set_counters(counters)
        consumed: int = counters[TRAIN]
        if self._is_to_be_replayed:
            own = self._manager.own.kept_at(self.step, SnapshotPoint.COMMITTED)
            if not own:
                raise UnrecoverableError(f"the outcome of step {self.step} of this rank is lost")
            self.replayed = _StepOutcome.from_plain(own["outcome"])
            consumed += self.replayed.samples
        return consumed

    def start(self) -> None:
        """Begin the loop: the state is in place, and only the random streams are put back here. Collective."""
        manager = self._manager
        if self.recovered:
            manager.restore_streams()
        else:
            self.step = self._trainer.counters()[STEP]
            self._journal.begin(self.step, SnapshotPoint.LOADED)
        manager.attach(self._journal, self.step)
        self._call.steps.begin_data()

    @property
    def _is_to_be_replayed(self) -> bool:
        resumed_at = self._manager.resumed_at
        return self.recovered and resumed_at is not None and resumed_at[1] is SnapshotPoint.COMMITTED

    # --- while training ---------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Take the state before the next step, and report that the step begins."""
        if self.replayed is not None:
            return
        self._journal.reached(self.step, SnapshotPoint.CHECKED)
        self._manager.make_copies(self.step)
        self._norms.forget()
        self._losses = []
        self._call.begin_step(self.step + 1)
        self._call.enter_phase("data", self.step + 1)

    def note(self, losses: Losses) -> None:
        """Note what forward and backward report of the step in the making."""
        self._losses = losses

    def end_step(self, reduced: Mapping[str, torch.Tensor]) -> None:
        """Record the step, whose update and schedulers are done.

        Args:
            reduced: the losses that the loop reports, by name; none on a rank outside of the last pipeline stage.
        """
        if self.replayed is None:
            if self._call.parameter_update_lock.committed < self._call.steps.making:
                return
            self.step = self._call.steps.making
        if self._log is not None:
            self._record_once(sum(float(value) for value in reduced.values()))
        if self.replayed is None:
            self._call.end_step()
            self._call.enter_phase("between", self.step)
        self.replayed = None

    def _record_once(self, loss: float) -> None:
        """Record the step, unless it is replayed and was recorded before. Collective."""
        if self.replayed is None:
            with torch.no_grad():  # a gather that is left to the next forward pass would come too late
                gather_parameters(
                    [each for each in sub_optimizers(self._optimizer) if _gathers_late(each)], force=True
                )
        elif self._log is not None and (self._log.last_step() or 0) >= self.step:
            return
        self._record(loss)

    def end(self) -> None:
        """Make no more copies of this training, whose loop is over."""
        self._manager.copies.finish()

    @contextmanager
    def replay(self, outcome: _StepOutcome) -> Iterator[None]:
        """Let the optimizer's ``step`` give ``outcome`` and change nothing but the streams while this lasts."""
        kept = outcome.succeeded, outcome.grad_norm, outcome.num_zeros

        def step() -> tuple[bool, float | None, float | None]:
            self._manager.restore_streams()
            return kept

        self._optimizer.step = step  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._optimizer.step

    # --- what the journal asks for --------------------------------------------------------------------------------

    @override
    def ready(self, step: int) -> Captured:
        """Capture the outcome of ``step``, with which the loop can replay the rest of it."""
        outcome = self._outcome().to_plain()
        losses = [float(values.sum()) for _, values in outcome["losses"].values()]
        repeated_steps.compute(step, sum(losses) if losses else None)
        return Captured(own={"outcome": outcome}, is_skipped=not outcome["succeeded"])

    @override
    def reached(self, step: int, point: SnapshotPoint) -> Captured:
        """Capture the state before the next step."""
        return Captured(self._capture(step))

    @override
    def _capture(self, step: int) -> Callable[[], dict[str, Any]]:
        """Capture the counters, and what has been added up to log, in addition."""
        capture, counters, began = super()._capture(step), self._trainer.counters(), self.began
        totals = dict(self.kept_totals or self.totals)  # what is kept, until the library logs for the first time
        return lambda: {**capture(), "counters": counters, "totals": totals, "began": began}

    def _outcome(self) -> _StepOutcome:
        succeeded = not self._update.overflow
        return _StepOutcome(
            self._losses,
            succeeded,
            self._norms.grad_norm if succeeded else None,
            self._norms.num_zeros if succeeded else None,
            self._trainer.samples(),
        )


def _gathers_late(optimizer: MegatronOptimizer) -> bool:
    """Return whether parameters are gathered in the forward pass that follows an update."""
    return bool(getattr(getattr(optimizer, "ddp_config", None), "overlap_param_gather", False))


@dataclass(frozen=True)
class _StepOutcome:
    """What forward, backward and update of one step gave this rank.

    Attributes:
        losses: for each microbatch the values to report, by name, each of one or two elements; empty on a rank
            that is not in the last pipeline stage.
        succeeded: whether the update was not skipped.
        grad_norm: norm of all gradients, if it was computed.
        num_zeros: number of gradients that are zero, if they were counted.
        samples: number of samples that the step took, of all ranks.
    """

    losses: Losses
    succeeded: bool
    grad_norm: float | None
    num_zeros: float | None
    samples: int

    def to_plain(self) -> dict[str, Any]:
        """Return the outcome as plain data, with one tensor for each name."""
        names = list(self.losses[0]) if self.losses else []
        stacked = {name: torch.stack([each[name].detach().view(-1) for each in self.losses]) for name in names}
        return {
            "losses": {name: (tensor.device.type, tensor.cpu()) for name, tensor in stacked.items()},
            "succeeded": self.succeeded,
            "grad_norm": self.grad_norm,
            "num_zeros": self.num_zeros,
            "samples": self.samples,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> _StepOutcome:
        """Return the outcome that :meth:`to_plain` gave."""
        stacked = {name: tensor.to(device) for name, (device, tensor) in plain["losses"].items()}
        microbatches = len(next(iter(stacked.values()))) if stacked else 0
        losses = [{name: tensor[number] for name, tensor in stacked.items()} for number in range(microbatches)]
        rest = {name: value for name, value in plain.items() if name != "losses"}
        return cls(losses, **rest)
