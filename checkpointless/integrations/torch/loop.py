"""A training loop of one's own, kept from step to step and resumed after a fault, whatever its optimizer is."""

from __future__ import annotations

import inspect
import io
import logging
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from typing_extensions import override

from checkpointless.inprocess import HPCallWrapper, StateLostError, UnrecoverableError
from checkpointless.inprocess.worker_streams import epochs_begun
from checkpointless.inprocess.wrap import putting_back
from checkpointless.integrations.torch.repeated_steps import repeated_steps
from checkpointless.observability.telemetry.steps import StepLog
from checkpointless.recovery.guard import UpdateGuard, vote
from checkpointless.recovery.manager import CheckpointManager, manager_of
from checkpointless.state.journal import Captured, FrontEnd, StepBefore, StepJournal
from checkpointless.state.module_tensors import TrainingTensors
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.rank_local.agreement import require_equal_replicas, require_same_step
from checkpointless.state.rank_local.declared import declared_state, has_state, put_object, put_value, take_object
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.digest import (
    MemoryChecksumManager,
    digest_buffers,
    digest_each,
    digest_parameters,
    digest_value,
    samples,
)
from checkpointless.state.serialization.tensor_memory import local_part
from checkpointless.system.environment import own_rank
from checkpointless.transfer.exchange import true_on_all
from checkpointless.transfer.tensor_entry import Key

_LEFT = (
    "steps() was left by break or return: after a fault, more steps are made there. Let steps(last) end the loop, "
    "or call stop() in its last step, before update() (docs/contract.md, 3)"
)
_NOT_BACK = "other_weights() ended with other parameters than it began with: restore them in a `finally` clause"
_TWO_LOOPS = (
    "a second training begins in the block, whose state could not be kept beside that of the first: give all "
    "modules and optimizers to one {name}, or train in two jobs"
)
_TWO_UPDATES = (
    "update() was called twice in step {}: a step has one update. Make two steps of it, in each of which the other "
    "optimizer's gradients are None"
)
_EXCHANGED = (
    "parameters were written to in step %d before its update(), as for a validation with other weights: a fault in "
    "such a step is the end of the job, unless they are exchanged in `with training.other_weights():`"
)
_CHANGED = (
    "{} is changed {}: after a fault it would be changed once more, or be that of no step. Change it within the "
    "update (the optimizer's register_step_post_hook), or make it a buffer if no optimizer updates it"
)
_CONTAINERS = (list, dict, set, deque, torch.Tensor, np.ndarray)
_NUMBERS = (bool, int, float, complex, str, bytes)
_LOOKS = 3  # at beginnings of steps: what is there before the first, what has changed from the second to the third
_LARGE = 1024  # elements of a tensor from which a look takes samples
_DEEPEST = 8  # containers within containers
_UNDECLARED = (
    "these variables of the loop change from step to step and begin anew after a fault: %s. Where a later step "
    "uses one, declare it: state={%r: %s} (docs/contract.md, 3)"
)
_ITERATOR = (
    "the iterator %s was made before the first step: after a fault it begins anew, and steps take other batches "
    "than without the fault. Make it in the loop, at the batch of the step that comes first there "
    "(docs/contract.md, 5)"
)
_NO_STATE = (
    "state[{!r}] is a {}: give an object with state_dict() and load_state_dict(), a list, dict, set, deque, "
    "tensor or array, a generator of random numbers, or Value(number)"
)
_DRAWN_BETWEEN = (
    "the loop draws random numbers between update() of step %d and the next step: a fault that finds a rank in "
    "update() or behind it leaves them out. Do it at the beginning of a step, which is made again after a fault"
)
_CHANGED_BETWEEN = (
    "declared state changes between update() of step %d and the next step: a fault that finds a rank in update() "
    "or after it leaves this out. Change it in a step, before its update() (docs/contract.md, 3)"
)
_COMPARED = (1, 2)  # the steps after which replicas are compared; a first learning rate of 0 leaves them equal
_warned: set[str] = set()  # once in a process
logger = logging.getLogger(__name__)


class Value:
    """A number or another plain value that a loop changes, as declared state::

        average = Value(0.0)
        training = PlainTraining(..., state={"average": average})
        for step in training.steps(1000):
            ...
            average.value = 0.9 * average.value + 0.1 * loss.item()

    Args:
        value: the first value.

    Attributes:
        value: the value now.
    """

    def __init__(self, value: object = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Return the value, as a state."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the value to that of a state."""
        self.value = state["value"]


class _LoopState:
    """The declared state of one loop, by name."""

    name = "state"

    def __init__(self, state: Mapping[str, Any]) -> None:
        for name, each in state.items():
            if not (has_state(each) or isinstance(each, _CONTAINERS)):
                raise ValueError(_NO_STATE.format(name, type(each).__name__))
        self._state = dict(state)

    def values(self) -> Mapping[str, Any]:
        return {name: take_object(each) for name, each in self._state.items()}

    def put(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            present = self._state.get(name)
            if has_state(present):
                put_object(present, value)
            elif name in self._state and put_value(present, value) is not present:
                raise ValueError(
                    f"state[{name!r}] was a {type(value).__name__} before the fault and is a "
                    f"{type(present).__name__} now: declare the same at every entry of the block"
                )


class JournaledTraining(FrontEnd):
    """A training in a block, with its journal, that records its steps; ``step`` is the newest committed one.

    A second training in an entry of the block, and one in another block, are refused.
    """

    _how_to_get_replicas = "A second holder of each part helps"

    def __init__(
        self, state: TrainingTensors, call: HPCallWrapper, schedulers: Sequence[Any], declared: Mapping[str, Any]
    ) -> None:
        loop_state = _LoopState(declared)
        if call.steps.loops:
            raise UnrecoverableError(_TWO_LOOPS.format(name=type(self).__name__))
        call.steps.loops += 1
        repeated_steps.begin_entry(call.is_first)
        call.blocks.begin_training(self._ended)
        declared_state.begin(lambda: [loop_state])
        declared_state.require_all()
        manager = manager_of(call)
        if manager is None:
            call.checkpoint_manager = manager = CheckpointManager()
        self.state = state
        self.step = 0
        self._schedulers = list(schedulers)
        self._call = call
        self._manager = manager
        self._journal = StepJournal(state, manager, self)
        self._log = StepLog.from_environment()
        groups = state.groups()
        alone = [example for group, example in groups.items() if len(group) == 1 < dist.get_world_size()]
        if alone and not manager.tiers and dist.get_rank() == 0:
            logger.warning(
                "no two ranks hold the same %s: a rank that dies cannot be restored from memory. "
                "%s, or CheckpointManager(tiers=[NeighborMemory()])",
                "part of the state" if len(groups) == 1 else f"{alone[0]} (others have more holders)",
                self._how_to_get_replicas,
            )
        if call.faults is not None:
            call.faults.target = lambda: next(iter(state.shard().values()))

    def _ended(self) -> None:
        """Look, when the block ends, at how the training was left."""

    def _recover(self) -> dict[str, Any] | None:
        """Recover from memory; return what was captured besides, or None. Collective."""
        call, manager = self._call, self._manager
        if call.is_first:
            return None
        call.enter_phase("recovery", call.high_water)
        objects = manager.recover(self._journal)
        if objects is None and call.high_water > 0:
            raise StateLostError(manager.refusal or "no rank holds the state in memory")
        return objects

    def _epoch(self) -> int:
        return 0

    def _record(self, loss: float | None, once: bool = False) -> None:
        """Record the committed step (``--record-steps``); with ``once`` only if it was not before a fault."""
        if self._log is None or (once and (self._log.last_step() or 0) >= self.step):
            return
        state, step, params = self.state, self.step, digest_parameters(self.state.modules)
        extras = dict(
            buffers=digest_buffers(state.modules),
            lr=tuple(rate.hex() for rate in state.rates()),
            optimizer=MemoryChecksumManager().digest_all(state.shard()),
            own=self._manager.own.streams.digests(step),
            batch=repeated_steps.batch_of(step),
            epoch=self._epoch(),
            validated=repeated_steps.was_validated or None,
        )
        repeated_steps.was_validated = False
        self._call.leave_if_over()  # what aborted collectives have left is not recorded
        repeated_steps.record(self._log, step, loss, params, **extras)

    @override
    def committed(
        self, step: int, ready: Captured, before: StepBefore | None
    ) -> Callable[[], dict[str, Any]] | None:
        return self._capture(step)

    def _capture(self, step: int) -> Callable[[], dict[str, Any]]:
        schedulers = [state_tree.copy(scheduler.state_dict()) for scheduler in self._schedulers]
        return lambda: {"step": step, "schedulers": schedulers}

    @override
    def restore(self, objects: dict[str, Any]) -> None:
        for scheduler, state in zip(self._schedulers, objects["schedulers"]):
            scheduler.load_state_dict(dict(state))


class LoopTraining(JournaledTraining, ABC):
    """What loops of one's own have in common. A subclass knows the optimizer.

    Args:
        declared: what else the loop changes, by name.
        known: objects that the training restores, in addition to its modules and parameters.
    """

    def __init__(
        self,
        state: TrainingTensors,
        call: HPCallWrapper,
        schedulers: Sequence[Any],
        declared: Mapping[str, Any],
        known: Iterable[object],
    ) -> None:
        self._ends = False  # whether the newest step is the last one, as stop() said
        self._own = {"call": -1}  # kept with a rank's streams and buffers: the newest call of steps() in this entry
        self._is_in_call = False
        self._resumed_in = 0  # the call in which this rank's streams and buffers were kept that it resumed with
        super().__init__(state, call, schedulers, declared)
        self._guard = UpdateGuard(call, self._journal, self._vote)
        self._done = 0  # before the job; a block that is entered again may load another checkpoint
        self._noted: Mapping[Key, bytes] = {}  # of what nothing but an update may change
        parameters = [each for module in state.modules for each in module.parameters()]
        restored = [self, call, declared, *declared.values(), *known, *state.modules, *schedulers, *parameters]
        self._undeclared = _Undeclared(restored)

    def steps(self, last: int, *, done: int = 0) -> Iterable[int]:
        """Yield the optimizer steps to make, from the first that is not committed to ``last``.

        If this is a restart, the state is recovered before the first of them. It may be called several times, for
        epochs, with ever later steps: a loop that is entered again makes the same calls, and those whose steps are
        made yield nothing.

        Args:
            last: the number of the last step.
            done: in the first call, how many steps were made before this job, if the block has loaded a checkpoint
                of its own: the first step is then ``done + 1``. After a fault, memory says which steps were made,
                and what the block has loaded meanwhile does not count.

        Raises:
            UnrecoverableError: steps were committed and no rank holds them any more, ``done`` is not the same on
                all ranks, or data comes from an iterator that was made before the first step.
            RuntimeError: a step ended without :meth:`update`.
        """
        self._ended()
        number, self._is_in_call = self._own["call"] + 1, True
        self._own = {"call": number}
        if number == 0:
            self._restore(done)
        else:
            self._refuse_changes("between two calls of steps()")
            self._manager.attach(self._journal, self.step)  # the copies of the call before are finished
            if number == self._resumed_in:  # what stands behind the calls before was done again
                self._manager.restore_streams()
                self._journal.put_back()
        self._noted = {}
        with repeated_steps.listening(self.state.modules):
            yield from self._remaining(last, number)
        self._is_in_call = False
        self._manager.copies.finish()
        self._note()

    def _remaining(self, last: int, number: int) -> Iterable[int]:
        begun_at = self.step
        while self.step < last and not self._ends:
            self._keep_again()
            if self.step > 0:
                self._manager.replicate_rng_states(self.step)
            if number > 0 and self.step == begun_at:
                true_on_all(True)  # what was drawn since the call before is kept on all ranks before any goes on
            if self.step - self._done in _COMPARED and self._call.high_water < self.step:
                require_equal_replicas(self.state, self.step)
            if self._manager.tiers:
                self._manager.make_copies(self.step)  # with what the loop has done since the update
            self._call.begin_step(self.step + 1)
            self._undeclared.look(sys._getframe(2))
            yield self.step + 1
            if self.step < self._call.steps.making:
                raise RuntimeError(f"step {self._call.steps.making} ended without a call of update()")
            self._call.end_step()
            self._call.enter_phase("between", self.step)

    def stop(self) -> None:
        """Make the step in progress the last one of the training: :meth:`steps` yields none after it.

        It is called before the :meth:`update` of that step. If one rank calls it, the training stops on all. A loop
        that is left by ``break`` would go on after a fault.

        Raises:
            RuntimeError: the update of the step was made, or no step is in progress.
        """
        if self.step >= self._call.steps.making:
            raise RuntimeError("stop() is called in a step, before its update()")
        self._ends = True

    @contextmanager
    def other_weights(self) -> Iterator[None]:
        """Allow other weights in the place of the trained ones meanwhile, such as averaged ones for a validation.

        All bytes of the parameters are compared with those before, which takes as long as reading them twice. A
        fault in this context costs nothing, either, if what exchanges weights puts them back in a ``finally``.

        Raises:
            UnrecoverableError: the context is left with other weights than it was entered with.
        """
        # What was written before the context says nothing of that, and stays noted.
        were_written, before, is_back = self._journal.are_written(), _digests_of(self.state.weights()), False
        with putting_back():
            try:
                yield
            finally:
                is_back = _digests_of(self.state.weights()) == before
                if is_back and not were_written:
                    self._journal.note_weights()
            if not is_back:
                raise UnrecoverableError(_NOT_BACK)

    # --- one step -------------------------------------------------------------------------------------------------

    def _vote(self) -> None:
        """Wait until every rank holds its final gradients; whether the step is the last is agreed on, too."""
        self._ends = vote(self._ends)

    def _compute(self, loss: float | None) -> None:
        """Keep the loss of the step, whose gradients are final, and compare it if the step is repeated."""
        self._call.steps.loss = loss
        repeated_steps.compute(self._call.steps.making, loss)

    @override
    def _epoch(self) -> int:
        return self._own["call"] + epochs_begun()

    @override
    def _ended(self) -> None:
        """Warn, once, if the newest call of steps() was left before it was over."""
        if self._is_in_call and _LEFT not in _warned and own_rank() == 0:
            _warned.add(_LEFT)
            logger.warning(_LEFT)

    def _keep_again(self) -> None:
        """Keep state, buffers and streams as the loop leaves them, uninterrupted: they must fit together."""
        known, has_drawn, has_changed = self._manager.own.streams.newest(self.step), False, False
        if known is not None:
            has_drawn, has_changed = self._manager.own.streams.have_moved(known)
        has_moved = known is not None and (has_drawn or has_changed or known.own != self._own)
        self._journal.reached(self.step, SnapshotPoint.COMMITTED, has_moved)
        self._undeclared.warn_of_changes(self.step, has_drawn, has_changed)

    def _restore(self, done: int) -> None:
        manager = self._manager
        self._arrange()
        try:
            objects = self._recover()
        except StateLostError as lost:
            if not manager.allow_restart_from_scratch:
                raise
            objects = None
            logger.error("%s: starting over at step %d, as allow_restart_from_scratch allows", lost.reason, done)
        self.step, self._done = (objects["step"], objects["done"]) if objects is not None else (done, done)
        if not self._call.is_first:
            states = manager.own.streams.newest(self.step)
            if self._done < self.step and states is not None:
                self._record(states.loss, once=True)  # committed, but the fault came before it was recorded
            if objects is not None:
                self._ends = objects["ends"]
                self._resumed_in = int((states.own if states is not None and states.own else {}).get("call", 0))
        if objects is None:
            require_same_step(done)
            self._journal.begin(done, SnapshotPoint.COMMITTED)
        manager.restore_streams()
        manager.attach(self._journal, self.step)
        self._call.steps.begin_data()

    def _note(self) -> None:
        """Note a few elements of what nothing but an update may change: parameters and the optimizers' state."""
        buffers = {key for key, _ in self.state.buffers.present()}
        tensors = self.state.tensors().items()
        self._noted = samples({key: tensor.detach() for key, tensor in tensors if key not in buffers})

    def _refuse_changes(self, when: str) -> None:
        """Refuse that something has changed, or is gone, since :meth:`_note`."""
        noted = self._noted
        if noted:
            self._note()
            key = next((key for key, sample in noted.items() if self._noted.get(key) != sample), None)
            if key is not None:
                raise UnrecoverableError(_CHANGED.format(self._title_of(key), when))

    def _title_of(self, key: Key) -> str:
        return f"the parameter {key[-1]}" if key[0] == "model" else ".".join(map(str, key))

    # --- what the journal asks for --------------------------------------------------------------------------------

    @override
    def ready(self, step: int) -> Captured:
        """Capture what only this rank has of ``step``; refuse one that was updated before."""
        if step <= self.step:
            raise UnrecoverableError(_TWO_UPDATES.format(step))
        if _EXCHANGED not in _warned and self.step > self._done and self._journal.are_written():
            _warned.add(_EXCHANGED)
            if dist.get_rank() == 0:
                logger.warning(_EXCHANGED, step)
        return Captured(own=self._own, loss=self._call.steps.loss)

    @override
    def updated(self, changes: bool) -> None:
        """Make one step of every scheduler, if the update was not skipped."""
        for scheduler in self._schedulers if changes else ():
            self._step_scheduler(scheduler)

    @override
    def _capture(self, step: int) -> Callable[[], dict[str, Any]]:
        capture, ends, done = super()._capture(step), self._ends, self._done
        return lambda: {**capture(), "done": done, "ends": ends}

    @override
    def reached(self, step: int, point: SnapshotPoint) -> Captured:
        return Captured(self._capture(step), self._own)

    # --- what a subclass knows ------------------------------------------------------------------------------------

    def _step_scheduler(self, scheduler: Any) -> None:
        scheduler.step()

    @abstractmethod
    def _arrange(self) -> None:
        """Arrange what would be arranged in the first step, and kept, in every generation alike. Collective."""


def _digests_of(weights: Iterable[torch.Tensor]) -> Mapping[tuple, int]:
    parts = {(index,): local_part(each).detach() for index, each in enumerate(weights)}
    return digest_each(parts)


# --- a look for what a loop changes and does not declare ----------------------------------------------------------


class _Undeclared:
    """Looks at the variables of the function that iterates over the steps, for what changes and is not declared."""

    def __init__(self, known: Iterable[object]) -> None:
        self._known = {id(each) for each in known}
        self._looks = 0
        self._found: set[str] = set()
        self._seen: dict[str, str] = {}

    def look(self, frame: FrameType | None) -> None:
        """Look at a frame when a step begins; in the third, warn once of what has changed since the first."""
        self._looks += 1
        if frame is None or self._looks > _LOOKS:
            return
        variables = _variables_of(frame)
        if self._looks == 1:
            self._found = {name for name, value in variables.items() if self._is_candidate(value)}
            for name, value in variables.items():
                if not hasattr(type(value), "__next__") or has_state(value):
                    continue
                if not (isinstance(value, io.IOBase) and not value.closed and value.writable()):  # else it is a log
                    self._warn(name, _ITERATOR, name)
            return
        now = {
            name: digest_value(_shortened(take_object(variables[name]), self._known))
            for name in self._found
            if name in variables
        }
        if self._looks == _LOOKS:
            changed = sorted(name for name, digest in now.items() if self._seen.get(name, digest) != digest)
            if changed:
                first = changed[0]
                is_held = isinstance(variables[first], _CONTAINERS) or has_state(variables[first])
                how = first if is_held and type(variables[first]) is not tuple else f"Value({first})"
                self._warn(first, _UNDECLARED, ", ".join(changed), first, how)
        self._seen = now

    def warn_of_changes(self, step: int, has_drawn: bool, has_changed: bool) -> None:
        """Warn, once each, of what the loop does between the update of ``step`` and the next step."""
        for happened, warning in ((has_drawn, _DRAWN_BETWEEN), (has_changed, _CHANGED_BETWEEN)):
            if happened:
                self._warn(warning, warning, step)

    def _warn(self, name: str, message: str, *values: object) -> None:
        if name not in _warned:
            _warned.add(name)
            logger.warning(message, *values)

    def _is_candidate(self, value: object) -> bool:
        if value is None:
            return True
        if id(value) in self._known:
            return False
        if isinstance(value, torch.nn.Module):
            return not any(id(each) in self._known for each in value.parameters())
        return has_state(value) or isinstance(value, (*_NUMBERS, *_CONTAINERS, tuple, np.generic))


def _variables_of(frame: FrameType) -> dict[str, Any]:
    if frame.f_code.co_flags & inspect.CO_GENERATOR and frame.f_back is not None:
        frame = frame.f_back
    variables = frame.f_locals
    found = dict(variables)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(variables, dict):
        variables.clear()  # Python 3.12 and older keep this copy, and what it refers to, until the frame ends
    return found


def _shortened(value: Any, known: Set[int], depth: int = 0) -> Any:
    """Return the plain data in ``value``, without what is known, and with samples in the place of large tensors."""
    if id(value) in known or depth > _DEEPEST:
        return None
    if isinstance(value, torch.Tensor):
        return value if value.numel() <= _LARGE else samples({0: value}).get(0, b"")
    if isinstance(value, (list, tuple, dict, set, frozenset, deque)) and len(value) > _LARGE:  # data, or a history
        ends = [value[0], value[-1]] if isinstance(value, (list, tuple, deque)) else []
        return [len(value), *(_shortened(each, known, depth + 1) for each in ends)]
    if isinstance(value, dict):
        return {key: _shortened(each, known, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [_shortened(each, known, depth + 1) for each in value]
    if isinstance(value, np.ndarray) and value.size > _LARGE:
        return [value.shape, value.ravel()[:: value.size // _LARGE].copy()]
    return value if isinstance(value, (*_NUMBERS, type(None), np.ndarray, np.generic)) else None
