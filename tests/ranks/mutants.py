"""Provide seeded defects of the recovery: a recipe takes one as a callback, and a test shows that somebody notices.

A callback is made again whenever a rank enters the block, in a respawned process too, and puts the defect in before
trainer and strategy exist. ``tests/ranks/test_mutants.py`` gives them to disturbed runs only.
"""

import copy
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from checkpointless.inprocess import ParameterUpdateLock, active_call_wrapper
from checkpointless.integrations.lightning.data.loaders import DataPosition
from checkpointless.integrations.megatron.state import sub_optimizers
from checkpointless.observability.telemetry.events import EventLog
from checkpointless.recovery import CheckpointManager, manager
from checkpointless.state.journal import StepJournal
from checkpointless.state.module_tensors import TrainingTensors
from checkpointless.state.port import SnapshotPoint, StepSnapshot
from checkpointless.state.serialization.tensor_memory import tensor_bytes
from checkpointless.transfer import transfer
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import Bucket

UPDATE_HELD_UP = "update_held_up"
_NOTICE_LIMIT_S = 10.0
_HELD_S = 1.0  # a fault thread that waits for nobody acts within this time

_originals: dict[tuple[Any, str], Any] = {}


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Have ``owner.name`` call ``function``, with what was there first before the arguments of a call."""
    original = _originals.setdefault((owner, name), getattr(owner, name))
    setattr(owner, name, lambda *args, **options: function(original, *args, **options))


# --- the parameter-update lock ------------------------------------------------------------------------------------


class HeldUpUpdate(Callback):
    """Makes no defect, but the moment at which the lock is needed: an update is half made when a fault comes.

    In ``step`` of the first generation the optimizer changes half of the parameters on ``ranks``, waits until the
    fault is known, and a second more, and then changes the others.
    """

    def __init__(self, step: int, ranks: Sequence[int], fails: bool = False) -> None:
        self.step = step
        self.ranks = list(ranks)
        self.fails = fails

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        call = active_call_wrapper()
        if call is None or call.generation != 0 or int(os.environ["RANK"]) not in self.ranks:
            return
        optimizers: Any = trainer.strategy.optimizers
        for optimizer in sub_optimizers(optimizers[0].mcore_optimizer):
            inner = optimizer.optimizer
            inner.step = lambda inner=inner: self._in_halves(inner)

    def _in_halves(self, inner: torch.optim.Optimizer) -> None:
        call = active_call_wrapper()
        assert call is not None
        _step_some(inner, slice(0, None, 2))
        if call.generation == 0 and call.steps.making == self.step:
            if self.fails:
                raise RuntimeError("an update fails half-way")
            noticed = self._wait_for_notice(call)
            log, generation = EventLog.here(), call.generation
            log.emit(UPDATE_HELD_UP, "point", generation=generation, noticed=noticed)  # type: ignore[arg-type]
        _step_some(inner, slice(1, None, 2))

    @staticmethod
    def _wait_for_notice(call: Any) -> bool:
        deadline = time.monotonic() + _NOTICE_LIMIT_S
        while call._responder.noticed < call.generation:  # takes no lock that an interruption could keep
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        going_on = time.monotonic() + _HELD_S
        while time.monotonic() < going_on:
            time.sleep(0.01)
        return True


def _step_some(inner: torch.optim.Optimizer, which: slice) -> None:
    """Update some parameters, through a copy of the optimizer that shares the rest: nothing has to be undone."""
    part = copy.copy(inner)
    part.state = inner.state
    part.param_groups = [{**group, "params": group["params"][which]} for group in inner.param_groups]
    type(inner).step(part)  # type: ignore[call-arg]


class NoLock(Callback):
    """The lock does nothing: the fault thread waits for no update, and nobody is told of one that failed."""

    def __init__(self) -> None:
        @contextmanager
        def update(original: Any, lock: ParameterUpdateLock, step: int) -> Iterator[None]:
            yield
            lock.set_committed(step)

        _replace(ParameterUpdateLock, "close", lambda original, lock, timeout: True)
        _replace(ParameterUpdateLock, "update", update)


class LockWithoutWaiting(Callback):
    """The fault thread keeps new updates out, but does not wait for the one in progress."""

    def __init__(self) -> None:
        def close(original: Any, lock: ParameterUpdateLock, timeout: timedelta) -> bool:
            original(lock, timedelta(0))
            return True

        _replace(ParameterUpdateLock, "close", close)


class LockWithoutTorn(Callback):
    """An update that failed counts as one that did not begin, and nobody sees that parameters have changed."""

    def __init__(self) -> None:
        @contextmanager
        def update(original: Any, lock: ParameterUpdateLock, step: int) -> Iterator[None]:
            try:
                with original(lock, step):
                    yield
            finally:
                lock._torn = False

        _replace(ParameterUpdateLock, "update", update)
        _replace(StepJournal, "changed", lambda original, journal: "")
        _replace(StepJournal, "_is_as_it_was", lambda original, journal, taken: True)


# --- random streams and data --------------------------------------------------------------------------------------


class StaleStreams(Callback):
    """After a recovery the random streams of an earlier step are put back."""

    def __init__(self, steps: int = 1, only: str | None = None) -> None:  # 0 steps: no defect
        def restore_streams(original: Any, keeper: CheckpointManager) -> None:
            if keeper.resumed_at is None:
                return
            step, stage = keeper.resumed_at
            right = keeper.own.streams.at(step)[stage]
            stale = keeper.own.streams.newest(step - steps) if steps else right
            assert stale is not None
            assert steps == 0 or right.streams != stale.streams
            streams = {name: stale.streams[name] for name in right.streams if only in (None, name)}
            assert streams
            dataclasses.replace(right, streams={**right.streams, **streams}).restore()

        _replace(CheckpointManager, "restore_streams", restore_streams)


class LostStreams(Callback):
    """After a recovery no random stream is put back."""

    def __init__(self) -> None:
        _replace(CheckpointManager, "restore_streams", lambda original, keeper, stage=None: None)


class ShiftedData(Callback):
    """After a recovery the data does not go on where it stood."""

    def __init__(self, samples: int) -> None:  # skipped, of the whole job; 0: no defect
        def snapshots(original: Any, journal: StepJournal, step: int) -> Mapping[SnapshotPoint, StepSnapshot]:
            found: Mapping[SnapshotPoint, StepSnapshot] = original(journal, step)
            for moment in found.values():
                position = DataPosition(*moment.objects["data"])
                assert position.began_at is not None
                moment.objects["data"] = tuple(position._replace(began_at=position.began_at + samples))
            return found

        _replace(StepJournal, "snapshots", snapshots)


# --- the transfer of a shard --------------------------------------------------------------------------------------


class TensorLeftOut(Callback):
    """One tensor is left out when a state moves; the rank that should get it keeps what it has.

    ``where`` is ``wire``: its bytes are lost before they are in their place; ``order``: it is not asked for;
    ``source``: the holders do not speak of it; ``room``: it is put beside its place; ``own``: a living rank does
    not take it back; ``nowhere``: no defect. ``tensor`` is a part of the last word of its key.
    """

    def __init__(self, where: str, tensor: str, rank: int) -> None:
        self.tensor = tensor
        self._place: torch.Tensor | None = None
        if where == "source":
            _replace(manager, "send_state", self._not_spoken_of)
        elif int(os.environ["RANK"]) != rank:
            return
        elif where in ("wire", "nowhere"):
            _replace(TrainingTensors, "allocate", self._found)
            _replace(transfer, "_in_place", self._never_in_place)
            _replace(transfer, "_unpack", partial(self._lost, where == "wire"))
        elif where == "order":
            _replace(transfer, "_keep", self._not_asked_for)
        elif where == "room":
            _replace(TrainingTensors, "allocate", self._beside)
        else:
            assert where == "own"
            _replace(manager._Refill, "_take_back", self._not_taken_back)

    def _is_chosen(self, key: Key) -> bool:
        return self.tensor in str(key[-1])

    def _chosen(self, keys: Iterable[Key]) -> Key:
        return next(filter(self._is_chosen, keys))

    def _found(self, original: Any, *args: Any) -> Mapping[Key, torch.Tensor]:
        places: Mapping[Key, torch.Tensor] = original(*args)
        self._place = places[self._chosen(places)]
        return places

    def _never_in_place(self, original: Any, tensors: Sequence[torch.Tensor], bucket: Bucket) -> Any:
        packed = any(tensors[part.index] is self._place for part in bucket)
        return None if packed else original(tensors, bucket)

    def _lost(
        self, lose: bool, original: Any, tensors: Sequence[torch.Tensor], bucket: Bucket, landed: Any, *args: Any
    ) -> None:
        offset = 0
        for part in bucket:
            target = tensors[part.index]
            if lose and target is self._place:
                landed[offset : offset + part.nbytes] = tensor_bytes(target)[part.start : part.stop]
            offset += part.nbytes
        original(tensors, bucket, landed, *args)

    def _not_asked_for(
        self, original: Any, entries: Sequence[TensorEntry], known: Any, places: Mapping[Key, torch.Tensor]
    ) -> set[Key]:
        kept: set[Key] = original(entries, known, places)
        chosen = next((entry.key for entry in entries if self._is_chosen(entry.key)), None)
        if self._place is None and chosen is not None:
            self._place = places[chosen]
            _make_definite(chosen, self._place)
            kept.add(chosen)
        return kept

    def _not_spoken_of(self, original: Any, tensors: Mapping[Key, Any], *args: Any, **options: Any) -> None:
        chosen = self._chosen(tensors)
        original({key: tensor for key, tensor in tensors.items() if key != chosen}, *args, **options)

    def _beside(self, original: Any, *args: Any) -> Mapping[Key, torch.Tensor]:
        places: Mapping[Key, torch.Tensor] = original(*args)
        chosen = self._chosen(places)
        _make_definite(chosen, places[chosen])
        return {**places, chosen: torch.empty_like(places[chosen])}

    def _not_taken_back(
        self, original: Any, refill: Any, state: TrainingTensors, tensors: dict[Key, torch.Tensor]
    ) -> Any:
        chosen = self._chosen(tensors)
        report = original(state, tensors)
        with torch.no_grad():  # what was there before is the tensor itself, where the model is kept
            state.allocate([TensorEntry.of(chosen, tensors[chosen])])[chosen].zero_()
        return report


def _make_definite(key: Key, tensor: torch.Tensor) -> None:
    """Zero optimizer state that was just made, because its memory may hold anything."""
    if key[0] == "optimizer":
        with torch.no_grad():
            tensor.zero_()
