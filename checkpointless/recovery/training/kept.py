"""``keep``: what a loop of one's own has built stays built in a rank that lives through a fault."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from checkpointless.inprocess import HPCallWrapper, UnrecoverableError, active_call_wrapper
from checkpointless.inprocess.communicators.process_groups import process_groups
from checkpointless.inprocess.context import tell
from checkpointless.recovery.held_state import HeldState
from checkpointless.recovery.rng import RngStates
from checkpointless.recovery.running import held_for, manager_of
from checkpointless.recovery.training.built import BuiltParts, is_compiled, taken_by
from checkpointless.recovery.training.first_sync import FirstSync, all_keep, sync_others
from checkpointless.recovery.training.interrupted import InterruptedUpdate
from checkpointless.telemetry.event_names import EventName

_Built = TypeVar("_Built")

_NOTE = "checkpointless"
_COMMUNICATES = (
    "keep(build): build communicates, but a rank that lives through a fault does not call it again: wrap modules "
    "and exchange weights behind keep"
)


def keep(build: Callable[[], _Built], *, warm: bool = True) -> _Built:
    """Build model and optimizer once: a rank that lives through a fault gets the same objects again.

    It is called in a re-executable code block, before the model is wrapped and
    :class:`~checkpointless.recovery.PlainTraining` is made::

        def build():
            model = Model().to(device)
            return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

        model, optimizer = keep(build)
        training = PlainTraining(modules=[DistributedDataParallel(model)], optimizers=[optimizer])

    Parameters, buffers and the optimizer's state then stay where they are, so that no second copy of them is made.
    All else looks as ``build`` had left it: there are no gradients, param groups and modes have their first values,
    and random streams go on from where they were behind ``build``. The training restores the rest, as always.

    Everything is built anew where it is not certain that the same would come of it; the event ``warm`` says why. So
    it is if hooks, parts or attributes have changed since, if something was written to parameters between ``keep``
    and the first step (pretrained weights belong into ``build``), and if what was built refers to process groups.

    Args:
        build: returns a module, an optimizer, or a tuple, list or dict of these. It does the same at every entry of
            the block, and does not communicate.
        warm: False: ``build`` is called each time, as it is outside of a block. It is the same on all ranks.

    Returns:
        What ``build`` has returned.

    Raises:
        UnrecoverableError: ``build`` communicates, or returns something else.
    """
    call = active_call_wrapper()
    if call is None or not warm:
        return build()
    now = _entry_of(call)
    found = _find(call, now, build)
    is_warm = found is not None
    parts = found if found is not None else _build(build, call, now)
    now.add(parts, is_warm)
    return cast(_Built, parts.returned)


class KeptParts:
    """What ``keep`` has returned in one entry of the block, for the training that uses it.

    Args:
        parts: what was built, in the order of the calls.
        are_warm: for each, whether it was kept over the last fault.
        modules: the modules of the training, with their wrappers.
        tensors: the tensors that the training restores.
        optimizers: the optimizers of the training.

    Attributes:
        parts: the argument.
        is_warm: whether any of it was kept over the last fault.
    """

    def __init__(
        self,
        parts: Sequence[BuiltParts],
        are_warm: Sequence[bool],
        modules: Iterable[torch.nn.Module],
        tensors: Iterable[torch.Tensor],
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        self.parts = list(parts)
        self.is_warm = any(are_warm)
        self._are_warm = list(are_warm)
        modules = list(modules)
        within = [each for module in modules for each in module.modules()]
        self._wrappers = [weakref.ref(each) for each in within if isinstance(each, DistributedDataParallel)]
        self._is_compiled = any(map(is_compiled, within))
        self._restored = {id(each) for each in tensors}
        self._stepped = {id(each) for each in optimizers}
        kept = {id(each) for built in self.parts for module in built.modules for each in module.parameters()}
        self._others = {id(each) for module in modules for each in module.parameters()} - kept

    def overwritten(self) -> str:
        """Return what the script has overwritten of the only copy that this rank has of its state; "": nothing.

        What was built anew and overwritten is built anew each time. It is asked once, before the training begins.
        """
        reason = ""
        for parts, is_warm in zip(self.parts, self._are_warm):
            if parts.obstacle:
                continue
            written = parts.written()
            if written and is_warm:
                reason = reason or f"{written} was written to between keep() and the first step"
            if written:
                parts.obstacle = f"{written} is written to between keep() and the first step"
            parts.forget_states()
        return reason

    def unfit(self) -> str | None:
        """Return why it cannot stay, in a phrase; None: it can."""
        if self._is_compiled:
            return "a module is compiled"
        for parts in self.parts:
            if any(id(each) not in self._stepped for each in parts.optimizers):
                return "an optimizer that keep() returned is none of the training's"
            if any(id(each) in self._others for each in parts.parameters):
                return "an optimizer that keep() returned has parameters of a module that it did not return"
            apart = {id(each) for each in [*parts.parameters, *parts.buffers]} - self._restored
            different, written = parts.difference(), parts.written(apart)
            if different or written:
                return different or f"{written} is no part of the training, and was written to"
        return None

    def are_wrapped(self) -> bool:
        """Return whether a wrapper of the modules is alive, whose hooks would fire in each backward pass."""
        if any(each() is not None for each in self._wrappers):
            gc.collect()
        return any(each() is not None for each in self._wrappers)

    def are_accumulated(self) -> bool:
        """Return whether hooks may hang on the accumulation of a gradient: a graph or the script refers to it."""
        parameters = [each for parts in self.parts for each in parts.parameters]
        if any(map(_is_still_accumulated, parameters)):
            gc.collect()
        return any(map(_is_still_accumulated, parameters))


def _is_still_accumulated(parameter: torch.Tensor) -> bool:
    """Return whether somebody holds what adds up a parameter's gradient in C++, where hooks hang that nobody sees.

    Torch makes it anew where nobody holds it. A note in it is gone then.
    """
    if not parameter.requires_grad or not parameter.is_leaf:
        return False
    notes: Any = get_gradient_edge(parameter).node.metadata
    notes[_NOTE] = True
    del notes
    notes = get_gradient_edge(parameter).node.metadata
    return notes.pop(_NOTE, None) is not None


def begin_with_kept(
    call: HPCallWrapper,
    modules: Sequence[torch.nn.Module],
    tensors: Iterable[torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
) -> KeptParts | None:
    """Return what ``keep`` has returned in this entry of the block, for a training that is about to begin.

    Args:
        call: the running wrapper.
        modules: the modules of the training, with their wrappers.
        tensors: the tensors that the training restores.
        optimizers: the optimizers of the training.

    Returns:
        None: ``keep`` was not called, or another training has begun with what it has returned.
    """
    global _entry
    now, _entry = _entry, None
    if now is None:
        return None
    now.sync.end()
    if not now.is_of(call):
        return None
    return KeptParts(now.parts, now.are_warm, modules, tensors, optimizers)


class _Entry:
    """One entry of the block, and what ``keep`` has returned in it.

    Args:
        call: the running wrapper.
    """

    def __init__(self, call: HPCallWrapper) -> None:
        self._call = weakref.ref(call)
        self._generation = call.generation
        self.parts: list[BuiltParts] = []
        self.are_warm: list[bool] = []
        self.sync = FirstSync()

    def is_of(self, call: HPCallWrapper) -> bool:
        """Return whether this is the present entry of ``call``."""
        return self._call() is call and self._generation == call.generation

    def add(self, parts: BuiltParts, is_warm: bool) -> None:
        """Note what ``keep`` is about to return."""
        self.parts.append(parts)
        self.are_warm.append(is_warm)
        self.sync.begin(self._sync)
        if is_warm or any(self.are_warm):
            self.sync.guard(self)

    def is_whole(self, owner: torch.nn.Module | torch.optim.Optimizer) -> bool:
        """Return whether all that belongs to ``owner`` was kept over the last fault."""
        if not self._is_running():
            return False
        warm = [parts for parts, is_warm in zip(self.parts, self.are_warm) if is_warm]
        if isinstance(owner, torch.optim.Optimizer):
            return any(owner is each for parts in warm for each in parts.optimizers)
        kept = {id(each) for parts in warm for each in [*parts.parameters, *parts.buffers]}
        tensors = [*owner.parameters(), *owner.buffers()]
        return bool(tensors) and all(id(each) in kept for each in tensors)

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies where a tensor does that was kept over the last fault."""
        return self._is_running() and tensor.numel() > 0 and tensor.data_ptr() in self._kept_places()

    def _is_running(self) -> bool:
        """Return whether the training of this entry is still to begin; an entry may be left before."""
        call = active_call_wrapper()
        return call is not None and self.is_of(call)

    def _kept_places(self) -> set[int]:
        return {
            each.data_ptr()
            for parts, is_warm in zip(self.parts, self.are_warm)
            for each in [*parts.parameters, *parts.buffers]
            if is_warm
        }

    def _sync(self, original: Any, group: Any, states: list[torch.Tensor], size: int, source: int) -> None:
        """Stand in for the first synchronisation of a wrapper: nothing that was kept is written to."""
        if not self._is_running():
            original(group, states, size, source)
            return
        kept = self._kept_places()
        are_kept = [each.data_ptr() in kept for each in states]
        if self._generation > 0 and all_keep(group, all(are_kept)):
            return
        if any(are_kept):
            sync_others(group, states, size, source, are_kept)
            return
        before = [parts.unwritten() for parts in self.parts]
        original(group, states, size, source)
        written = {each.data_ptr() for each in states}
        for parts, unwritten in zip(self.parts, before):
            parts.note_those(written & unwritten)


_entry: _Entry | None = None  # the newest in which keep() was called


def _entry_of(call: HPCallWrapper) -> _Entry:
    global _entry
    if _entry is None or not _entry.is_of(call):
        if _entry is not None:
            _entry.sync.end()
        _entry = _Entry(call)
    return _entry


def _build(build: Callable[[], object], call: HPCallWrapper, now: _Entry) -> BuiltParts:
    known = {id(each) for parts in now.parts for each in parts.all()}
    foreign = next((each for each in taken_by(build) if id(each) not in known), None)
    before = RngStates.capture()
    launched = process_groups.launched() if call.generation == 0 else {}
    returned = build()
    if call.generation == 0 and process_groups.launched() != launched:
        raise UnrecoverableError(_COMMUNICATES)
    parts = BuiltParts(build, returned, (before, RngStates.capture()))
    if foreign is not None:
        parts.obstacle = f"build uses a {type(foreign).__name__} that keep() did not return"
    return parts


def _find(call: HPCallWrapper, now: _Entry, build: Callable[[], object]) -> BuiltParts | None:
    """Return what was kept for this call of ``keep``, as ``build`` would return it; None: it is to be built."""
    began_s = time.monotonic()
    manager = manager_of(call)
    kept = manager.kept[1] if manager is not None and manager.kept is not None else None
    if manager is None or not isinstance(kept, KeptParts):
        return None
    held = held_for(manager, 1)
    place = len(now.parts)
    reason: str | None
    if held is None or held.commit.committed < 1:
        reason = "this rank holds no state after a step"
    elif held.built_upon and not any(now.are_warm):
        reason = "another fault came before what was kept was restored"
    elif place >= len(kept.parts) or not kept.parts[place].is_built_by(build):
        reason = "keep() was called with other functions before"
    else:
        reason = _obstacle(kept, kept.parts[place], held)
    if reason is not None or held is None:
        manager.kept = None
        tell(EventName.WARM, kept=False, reason=reason)
        return None
    parts = kept.parts[place]
    held.built_upon = True  # from here on, nothing but a restore makes it whole
    if held.live is not None:
        _set_aside(held.live, parts.interrupted())
    parts.restore()
    tell(EventName.WARM, kept=True, seconds=time.monotonic() - began_s)
    return parts


def _obstacle(kept: KeptParts, parts: BuiltParts, held: HeldState) -> str | None:
    """Return why what was kept cannot be used now; None: it can."""
    before, now = parts.streams[0].streams, RngStates.capture().streams
    if any(state != now[name] for name, state in before.items() if name in now):
        return "random numbers were drawn otherwise before"
    if held.live is not None:
        _unwrap(held.live)
    if kept.are_wrapped():
        return "a DistributedDataParallel of the modules is still referred to"
    if kept.are_accumulated():
        return "the accumulation of a gradient is still referred to, where hooks may hang"
    return kept.unfit()


def _set_aside(live: Any, update: InterruptedUpdate) -> None:
    """Give the training that is over what it needs to make its interrupted update again."""
    live.set_aside(update)


def _unwrap(live: Any) -> None:
    """Have the training that is over let its wrappers go, though its update is still to be made."""
    live.unwrap()
