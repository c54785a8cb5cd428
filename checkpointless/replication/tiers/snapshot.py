"""The whole state of one rank as plain bytes and tensors, as tiers keep it and a process hands it over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.inprocess.wrap import own_board
from checkpointless.replication.parts import Content
from checkpointless.state.held_state import HeldState
from checkpointless.state.journal import StepJournal
from checkpointless.state.port import SnapshotPoint, StepSnapshot, essentials_of
from checkpointless.state.rank_local.state import RankLocalState
from checkpointless.state.rng import RngStates
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.tensor_memory import own_device
from checkpointless.transfer.tensor_entry import Key

_FORMAT = 3
#: The moment after a step at which copies are made: the first one, so that a finished step is soon copied.
COPIED_AT = SnapshotPoint.COMMITTED
#: Saves that were not finished when a step was made: the step, and what the save of each was.
Saves = Sequence[tuple[int, int, int, bool]]


@dataclass(frozen=True)
class RankLocal:
    """What only this rank has.

    Attributes:
        streams: its random streams, each with its step.
        data_start: the streams that the order of its data was drawn from; None: there are none.
        records: the records of its own buffers, with step and stage.
    """

    streams: Sequence[tuple[int, RngStates]] = ()
    data_start: RngStates | None = None
    records: Sequence[tuple[int, SnapshotPoint, bytes]] = ()

    @classmethod
    def of(
        cls,
        own: RankLocalState,
        streams: Iterable[tuple[int, RngStates]],
        moments: Iterable[tuple[int, SnapshotPoint]],
    ) -> RankLocal:
        """Return what ``own`` has: streams, and the records of its buffers at some snapshots."""
        records = [(step, stage, own.buffers.record(step, stage, own_board())) for step, stage in moments]
        known = [(step, stage, record) for step, stage, record in records if record is not None]
        return cls(tuple(streams), own.streams.data_start(), known)

    def put_back(self, own: RankLocalState) -> None:
        """Keep it in ``own``, whose streams of other steps are forgotten, but not which buffers differ."""
        own.streams.forget()
        for step, states in sorted(self.streams, key=lambda each: (each[0], each[1].stage)):
            own.streams.keep(step, states)
        if self.data_start is not None:
            own.streams.keep_data_start(self.data_start)
        for step, stage, record in self.records:
            own.buffers.keep_record(step, stage, record, own_board())


@dataclass(frozen=True)
class Snapshot:
    """The whole state of one rank.

    Attributes:
        base: what is kept besides, over all generations: the frozen weights in fine-tuning.
        begun: the last fit of the block that is known to have begun.
        saves: the background saves whose end this rank has not gone through; their writers end with the process.
    """

    held: HeldState
    base: Mapping[Key, torch.Tensor] = field(default_factory=dict)
    begun: int = 0
    finished: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    saves: Saves = ()
    own: RankLocal = RankLocal()

    def content(self) -> Content:
        """Return the snapshot as plain bytes and tensors, which are the same ones."""
        held, row = self.held, _Row()
        objects = {int(stage): moment.objects for stage, moment in held.moments.items()}
        skeleton, inside = state_tree.split({"moments": objects, "finished": dict(self.finished)})
        start = self.own.data_start
        plain: dict[str, Any] = {
            "format": _FORMAT,
            "committed": held.commit.committed,
            "fit": held.fit,
            "offset": held.offset,
            "begun": self.begun,
            "saves": [[*save[:3], False] for save in self.saves],
            "tensors": row.keyed(held.tensors),
            "base": row.keyed(self.base),
            "moments": [[int(stage), row.keyed(moment.buffers)] for stage, moment in held.moments.items()],
            "buffers": [[step, int(stage), row.keyed(each)] for (step, stage), each in held.buffers.items()],
            "digests": None if held.digests is None else [[list(of), each] for of, each in held.digests.items()],
            "objects": skeleton,
            "inside": row.put(inside),
            "streams": [[step, states.to_bytes()] for step, states in self.own.streams],
            "data_start": start.to_bytes() if start is not None else None,
            "records": [[step, int(stage), record] for step, stage, record in self.own.records],
        }
        plain["devices"] = [tensor.device.type for tensor in row.tensors]
        return Content(state_tree.dumps(plain), tuple(tensor.detach() for tensor in row.tensors))

    @classmethod
    def of(cls, content: Content) -> Snapshot:
        """Return the snapshot that :meth:`content` made, its tensors in host memory.

        Numbers, tensors without a dimension, and what the objects refer to are on the device on which they were.

        Raises:
            ValueError: it did not make this, or another version did.
        """
        try:
            plain = state_tree.loads(content.structure)
            if plain["format"] != _FORMAT:
                raise ValueError(f"a state of a rank in format {plain['format']}, and not {_FORMAT}")
            inside, tensors = {*plain["inside"]}, list(content.tensors)
            for place, kind in enumerate(plain["devices"]):
                if kind != "cpu" and (place in inside or not tensors[place].dim()):
                    tensors[place] = tensors[place].to(own_device(kind))

            def read(rows: Iterable[Any]) -> dict[Key, torch.Tensor]:
                return {key: tensors[place] for key, place in rows}

            objects = state_tree.join(plain["objects"], [tensors[place] for place in plain["inside"]])
            held = HeldState(
                CommitState(plain["committed"], ready=False, torn=False),
                read(plain["tensors"]),
                {
                    SnapshotPoint(stage): StepSnapshot(objects["moments"][stage], read(rows))
                    for stage, rows in plain["moments"]
                },
                None if plain["digests"] is None else {tuple(group): each for group, each in plain["digests"]},
                fit=plain["fit"],
                offset=plain["offset"],
                buffers={(step, SnapshotPoint(stage)): read(rows) for step, stage, rows in plain["buffers"]},
            )
            start = plain["data_start"]
            own = RankLocal(
                [(step, RngStates.from_bytes(each)) for step, each in plain["streams"]],
                None if start is None else RngStates.from_bytes(start),
                [(step, SnapshotPoint(stage), record) for step, stage, record in plain["records"]],
            )
            saves = tuple((number, step, stage, going_on) for number, step, stage, going_on in plain["saves"])
            return cls(held, read(plain["base"]), plain["begun"], objects["finished"], saves, own)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"this is no state of a rank: {error!r}") from error


class _Row:
    """Tensors in their order, each once."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def put(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """Return the places of ``tensors``."""
        places = []
        for tensor in tensors:
            if id(tensor) not in self._places:
                self._places[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
            places.append(self._places[id(tensor)])
        return places

    def keyed(self, tensors: Mapping[Key, torch.Tensor]) -> list[list[Any]]:
        """Return the keys of ``tensors``, each with its place."""
        return [list(pair) for pair in zip(tensors, self.put(tensors.values()), strict=True)]


def snapshot_of(journal: StepJournal, own: RankLocalState, step: int, fit: int, offset: int) -> Snapshot | None:
    """Return the state of this rank after ``step``, its tensors as they live; None if it has no such snapshot.

    The tensors are those from which, with all other ranks', model and optimizer can be rebuilt.

    Args:
        journal: that of the training, right after the update.
    """
    moment, streams = journal.snapshots(step).get(COPIED_AT), own.streams.at(step).get(COPIED_AT)
    if moment is None or streams is None:
        return None
    before, at = own.streams.newest(step - 1), (step, COPIED_AT)
    known = [(step, streams)] if before is None else [(step - 1, before), (step, streams)]
    held = HeldState(
        CommitState(step, ready=False, torn=False),
        dict(essentials_of(journal.state)),
        {COPIED_AT: moment},
        fit=fit,
        offset=offset,
        buffers={at: moment.buffers},
    )
    return Snapshot(held, own=RankLocal.of(own, known, [at]))
