"""The journal of a rank's steps: snapshots at its newest step boundaries, and the update in the making.

A training reports to it when the gradients of a step are final (:meth:`StepJournal.ready`), when their update is
applied, and when it has reached a point after a step; what a later step changes is captured then. What only this
rank has is kept outside of the process, too, and always before the snapshot.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from checkpointless.inprocess import UnrecoverableError
from checkpointless.state.port import MODEL, UPDATED_BUFFERS, SnapshotPoint, StepSnapshot, TrainingState
from checkpointless.state.rank_local.state import RankLocalKeeper
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.state_tree import Later
from checkpointless.state.serialization.tensor_memory import flat_bytes, local_part
from checkpointless.transfer.tensor_entry import Key

Objects = dict[str, Any]
version_of = operator.attrgetter("_version")

#: How often each weight was written to, as torch counts it, and bytes of a few elements of some, one tensor per
#: device, which stay where they are until they are compared.
Seen: TypeAlias = tuple[list[int], tuple[torch.Tensor, ...]]

_TENSORS = 8  # that are looked at, and so many bytes of each
_BYTES = 64
_CHANGED = (
    "parameters were changed beside the update since step {} ({}), for example by a hook that exchanges or clamps "
    "weights, or in the forward pass of an Embedding with max_norm: let the optimizer's register_step_post_hook do "
    "it, or keep such weights as buffers"
)


@dataclass(frozen=True)
class Captured:
    """What a front end has captured.

    ``own`` is what only this rank has of it (None: it is too large to keep), ``loss`` that of the step (None: not
    known, or kept before), and ``is_skipped`` says whether its update is left out, since its gradients overflow.
    """

    objects: Callable[[], Objects] = dict
    own: Mapping[str, Any] | None = field(default_factory=dict)
    loss: float | None = None
    is_skipped: bool = False


class _Taken(Later[Objects]):
    """The objects of a snapshot, which get their form when they are asked for, and what was seen of the weights."""

    __slots__ = ("buffers", "seen")

    def __init__(
        self, make: Callable[[], Objects], buffers: Mapping[Key, torch.Tensor], seen: Seen | None = None
    ) -> None:
        super().__init__(make)
        self.buffers = buffers
        self.seen = seen


class FrontEnd:
    """What a kind of training keeps in addition to model and optimizer. This one keeps nothing."""

    def ready(self, step: int) -> Captured:
        """Capture what ``step`` has changed, now that its gradients are final."""
        return Captured()

    def updated(self, changes: bool) -> None:
        """Make, inside the lock, what belongs to an update that is applied; ``changes``: it was not skipped."""

    def committed(self, step: int, ready: Captured, before: StepBefore | None) -> Callable[[], Objects] | None:
        """Return what makes plain data of what the commit of ``step`` leaves, or None: no snapshot."""
        return ready.objects

    def reached(self, step: int, point: SnapshotPoint) -> Captured:
        """Capture the state at ``point`` after ``step``."""
        return Captured()

    def restore(self, objects: Objects) -> None:
        """Put back the objects of a snapshot, of which model and optimizer have theirs already."""

    def own_parts(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return parts of a snapshot's objects, by name, that may differ between ranks: no peer has a lost one."""
        return {}


StepBefore = tuple[SnapshotPoint, _Taken]
_Pending = tuple[int, Captured, _Taken]  # the step in the making, and model and optimizer before its update


class StepJournal:
    """Keeps what a rank needs to resume at its newest step boundaries.

    ``keeper`` keeps streams and buffers, over faults, too; ``front`` what else belongs to the training; ``built``:
    what can stay built over a fault.
    """

    def __init__(self, state: TrainingState, keeper: RankLocalKeeper, front: FrontEnd) -> None:
        self.state = state
        self.built: Any = None  # Any: its ``unfit()`` returns why it cannot stay, in a phrase; None: it can
        self._keeper = keeper
        self.front = front
        self._watch = _WeightWatch(state.weights)
        self._taken: dict[tuple[int, SnapshotPoint], _Taken] = {}
        self._pending: _Pending | None = None
        self._updated: set[Key] = set()  # the buffers that the update itself writes to
        self._travel: set[SnapshotPoint] = set()  # points whose snapshots are known to be fit for another process

    # --- what a training reports ----------------------------------------------------------------------------------

    def begin(self, step: int, point: SnapshotPoint) -> None:
        """Begin with a state that no recovery has given. Collective."""
        self.state.rederive(first=True)
        self._keeper.own.begin_buffers(self.state)
        self.reached(step, point)

    def ready(self, step: int) -> None:
        """Capture what ``step`` has changed, now that its gradients are final. Collective."""
        keeper, state = self._keeper, self.state
        captured, buffers = self.front.ready(step), state.buffers.take()
        self._pending = step, captured, _Taken(state.capture(), buffers)
        state.buffers.mark()
        keeper.own.buffers.keep(buffers)
        keeper.store_rng_states(step, captured.loss, SnapshotPoint.COMMITTED, captured.own)
        keeper.replicate_rng_states(step)
        keeper.parameter_update_lock.mark_ready(step)

    def applied(self) -> None:
        """Capture what the update of the step in the making leaves. It is called inside the lock."""
        if self._pending is None:
            return
        step, ready, model = self._pending
        self.front.updated(not ready.is_skipped)
        written = self.state.buffers.written()
        self._updated.update(written)
        buffers = self.state.buffers.take() if written else model.buffers
        objects = self.front.committed(step, ready, self._before(step))
        if objects is None:
            return
        self._taken = {(step, SnapshotPoint.COMMITTED): self._take(SnapshotPoint.COMMITTED, objects, buffers)}
        self._pending = None
        if written:  # what was kept before the update is not what is now
            self._keeper.own.keep_buffers(step, SnapshotPoint.COMMITTED, buffers)

    def reached(self, step: int, point: SnapshotPoint, keeps_streams: bool = True) -> None:
        """Capture the point after ``step`` that is reached, with the streams unless they have not moved."""
        buffers, captured = self.state.buffers.take(), self.front.reached(step, point)
        taken = self._take(point, captured.objects, buffers)
        if point not in self._travel:
            try:
                state_tree.check(taken())
            except state_tree.StateTreeError as error:
                raise UnrecoverableError(f"{error}; no new process could be given this state") from error
            self._travel.add(point)
        if keeps_streams:
            if point is not SnapshotPoint.ACCUMULATED:  # nobody resumes there
                self._keeper.own.buffers.keep(buffers)
            self._keeper.store_rng_states(step, captured.loss, point, captured.own)
        else:
            self._keeper.own.keep_buffers(step, point, buffers)
        kept = {key: each for key, each in self._taken.items() if key[0] == step}
        self._taken = {**kept, (step, point): taken}

    def _take(
        self, point: SnapshotPoint, objects: Callable[[], Objects], buffers: Mapping[Key, torch.Tensor]
    ) -> _Taken:
        model = self.state.capture()
        updated = {UPDATED_BUFFERS: sorted(self._updated)} if point is SnapshotPoint.COMMITTED else {}
        return _Taken(lambda: {**objects(), **updated, MODEL: model()}, buffers, self._watch.see())

    def _before(self, step: int) -> StepBefore | None:
        """Return the newest snapshot of the step before ``step``, with its point."""
        point = max([point for at, point in self._taken if at == step - 1], default=None)
        return (point, self._taken[step - 1, point]) if point is not None else None

    # --- whether something other than updates changes weights -----------------------------------------------------

    def note_weights(self) -> None:
        """Note that the weights are those of the newest snapshot, although they were written to."""
        if self.newest is not None and self._taken[self.newest].seen is not None:
            self._taken[self.newest].seen = self._watch.see()

    def are_written(self) -> bool:
        """Return whether weights were written to since the newest snapshot, as far as torch counts it."""
        seen = self._taken[self.newest].seen if self.newest is not None else None
        return seen is not None and self._watch.is_written(seen)

    def changed(self) -> str:
        """Return why the tensors are not those of the newest snapshot; "" if nothing is known of it."""
        reason = self.state.grown()
        if reason or self.newest is None or self._is_as_it_was(self._taken[self.newest]):
            return reason
        step, point = self.newest
        return _CHANGED.format(step, point.name.lower())

    def _is_as_it_was(self, taken: _Taken) -> bool:
        return taken.seen is None or not self._watch.is_other(taken.seen)

    # --- what recovery asks for -----------------------------------------------------------------------------------

    @property
    def newest(self) -> tuple[int, SnapshotPoint] | None:
        """The newest step and the point reached after it; None: the training has not begun."""
        return max([key for key in self._taken if key[1] is not SnapshotPoint.ACCUMULATED], default=None)

    def snapshots(self, step: int) -> Mapping[SnapshotPoint, StepSnapshot]:
        """Return the non-tensor state at each point after ``step`` to resume at, whole and of this step only."""
        found = {
            point: taken
            for (at, point), taken in sorted(self._taken.items())
            if at == step and point is not SnapshotPoint.ACCUMULATED and self._is_as_it_was(taken)
        }
        if self._pending is not None and self._pending[0] == step:
            _, ready, model = self._pending
            objects = self.front.committed(step, ready, self._before(step))
            if objects is not None:
                made = {**objects(), MODEL: model()}
                found.setdefault(SnapshotPoint.COMMITTED, _Taken(lambda: made, model.buffers))
        return {point: StepSnapshot(taken(), taken.buffers) for point, taken in found.items()}

    def objects(self) -> Objects:
        assert self.newest is not None
        return self._taken[self.newest]()

    def buffers(self, step: int) -> Mapping[SnapshotPoint, Mapping[Key, torch.Tensor]]:
        """Return this rank's buffers at each point after ``step``; if its update failed, those before it."""
        found: dict[SnapshotPoint, Mapping[Key, torch.Tensor]] = {
            point: taken.buffers
            for (at, point), taken in self._taken.items()
            if at == step and point is not SnapshotPoint.ACCUMULATED
        }
        if self._pending is not None and self._pending[0] == step:
            found.setdefault(SnapshotPoint.COMMITTED, self._pending[2].buffers)
        return found

    def finish_update(self) -> None:
        """Apply the update whose final gradients are held, unless they had overflowed."""
        if self._pending is None:
            self.state.finish_update()
            return
        _, ready, model = self._pending
        self.state.restore(model())  # a scheduler that was made since has changed the values of the groups
        if not ready.is_skipped:
            self.state.finish_update()
        self.applied()

    def restore(self, step: int, point: SnapshotPoint, objects: Objects) -> None:
        """Put the objects of a snapshot back, whose tensors are in place. Collective."""
        self.state.restore(objects[MODEL])
        self.state.rederive()
        self.front.restore(objects)
        self._taken = {(step, point): _Taken(lambda: objects, self.state.buffers.take())}
        self._pending = None

    def put_back(self) -> None:
        """Undo what hooks have done to buffers and modules since the state was put in place."""
        for taken in self._taken.values():
            model = taken()[MODEL]
            self.state.buffers.put(taken.buffers)
            self.state.restore({name: model[name] for name in ("modes", "trained", "syncs") if name in model})


# --- Whether weights are those of a step boundary -----------------------------------------------------------------
#
# Code outside the update may put other weights into the places of the trained ones, such as an average for a
# validation. A fault meanwhile would find them there. Version counters of torch say much of it for nothing, but not
# what is written through ``parameter.data``: a few elements of a few tensors do. A fault is when they are compared.


class _WeightWatch:
    """Shows whether weights, which nothing but an update may change, are those that they were."""

    def __init__(self, weights: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._weights = weights
        self._looked_at: tuple[int, list[torch.Tensor]] = (-1, [])  # of so many weights

    def see(self) -> Seen:
        """Return what is seen of the weights now, without waiting for a device."""
        versions = list(map(version_of, self._weights()))
        if self._looked_at[0] != len(versions):
            fit = [
                each
                for each in self._weights()
                if each.layout is torch.strided and not each.is_meta and not each.is_quantized
            ]
            self._looked_at = len(versions), fit[:: max(1, len(fit) // _TENSORS)][:_TENSORS]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        with torch.no_grad():
            for each in self._looked_at[1]:
                part = local_part(each)
                if part.numel() and part.is_contiguous():
                    middle = flat_bytes(part)
                    start = len(middle) // 2 // 16 * 16
                    by_device.setdefault(part.device, []).append(middle[start : start + _BYTES])
            return versions, tuple(torch.cat(parts) for parts in by_device.values())

    def is_written(self, seen: Seen) -> bool:
        """Return whether torch has counted a write since; it costs no look at the bytes."""
        return seen[0] != list(map(version_of, self._weights()))

    def is_other(self, seen: Seen) -> bool:
        """Return whether the weights are known not to be those that were seen; this may wait for a device."""
        if self.is_written(seen):
            return True
        now = self.see()[1]
        return len(now) != len(seen[1]) or not all(map(torch.equal, now, seen[1]))
