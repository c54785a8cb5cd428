"""The state of a rank on its way from a process to its successor, in the memory of the node.

A process that cannot enter its block again writes what it holds into a part file (as local checkpoints are) in a
folder of shared memory that the agent has made for this user only. The successor reads it, compares every digest,
and holds the state as if it had lived through the fault: the ranks decide on it like on any other. Nothing is
unpickled. The file stays until training goes on, so that a further process of the rank finds it, too.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpointless.environment import HANDOVER_ENV, LOCAL_WORLD_SIZE_ENV, own_rank, own_world_size
from checkpointless.inprocess.context import own_board
from checkpointless.inprocess.exceptions import line_of
from checkpointless.inprocess.memory import free_host_memory
from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.recovery.conference import Saves
from checkpointless.recovery.held_state import HeldState
from checkpointless.recovery.moment import Moment, Stage
from checkpointless.recovery.own.state import OwnState
from checkpointless.recovery.rng import RngStates
from checkpointless.replication.directory import DirectoryStore
from checkpointless.replication.parts import Content, Part, PartError, PartId, SaveId
from checkpointless.serialization import state_tree
from checkpointless.serialization.tensor_memory import own_device
from checkpointless.telemetry.wording import size
from checkpointless.transfer.tensor_entry import Key

logger = logging.getLogger(__name__)

_FORMAT = 1
_NO_FOLDER = "the agent has no folder in shared memory for it"


@dataclass(frozen=True)
class Estate:
    """What a process leaves to its successor.

    Attributes:
        held: the state that it holds; None: it holds none, and what the process before has left stays.
        base: what is kept besides, over all generations: the frozen weights in fine-tuning.
        begun: the last fit of the block that is known to have begun.
        finished: by fit, the non-tensor state in which the fit ended.
        saves: the background saves whose end this rank has not gone through; their writers end with the process.
    """

    held: HeldState | None
    base: Mapping[Key, torch.Tensor] = field(default_factory=dict)
    begun: int = 0
    finished: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    saves: Saves = ()


def hand_over(estate: Estate, own: OwnState, high_water: int) -> tuple[int, str]:
    """Write what this process leaves into the memory of the node.

    Args:
        estate: what it leaves.
        own: what is this rank's own. The board, which stays, has a copy of what is small enough.
        high_water: the highest optimizer step that any rank was ever seen to commit. If this rank holds the
            gradients of that step, it makes the update first.

    Returns:
        How many bytes the successor finds (0: there is no state yet), and why it could not be done ("": it was).
    """
    root, held = _root(), estate.held
    if root is None:
        return 0, _NO_FOLDER
    if held is None:  # what the process before this one has left stays
        return sum(path.stat().st_size for path in root.glob("*")), ""
    try:
        clear()
        if held.commit.ready and held.commit.committed == high_water - 1:
            held.redo(high_water)
        if held.commit.torn:
            return 0, held.given_up or "an update failed half-way"
        content = _content(estate, held, own)
        lacking = _lacking_room(content.nbytes, root.parent)
        if lacking:
            return 0, lacking
        name = PartId(SaveId(max(held.commit.committed, 0), secrets.token_hex(12)), own_rank())
        DirectoryStore(root).write(Part.sealed(name, own_world_size(), content), own_rank())
    except (OSError, MemoryError, RuntimeError, ValueError, TypeError) as error:
        clear()
        return 0, line_of(error)
    return content.nbytes, ""


def take_over(own: OwnState) -> Estate | None:
    """Return what the process before this one has left; None, with a warning if it is damaged: it left nothing.

    Args:
        own: what is this rank's own, which is put back.
    """
    root, rank = _root(), own_rank()
    if root is None or not root.is_dir():
        return None
    try:
        shelf = DirectoryStore(root).shelf(own_world_size())
        for save in sorted(shelf, reverse=True):
            for file in shelf[save].get(rank, ()):
                return _estate(file.read().content, own)
    except (OSError, PartError, ValueError) as error:
        logger.error("what the process before this one handed over cannot be used: %s", error)
        return None
    logger.error("what the process before this one handed over cannot be used")
    return None


def clear() -> None:
    """Remove what was handed over, because training goes on with it or without it."""
    root = _root()
    if root is not None:
        shutil.rmtree(root, ignore_errors=True)


def _root() -> Path | None:
    folder = os.environ.get(HANDOVER_ENV)
    return Path(folder) / f"rank-{own_rank()}" if folder else None


def _lacking_room(nbytes: int, folder: Path) -> str:
    """Return why ``folder`` has no room for so many bytes of each rank of the node; "" if it has."""
    about, ranks = os.statvfs(folder), int(os.environ.get(LOCAL_WORLD_SIZE_ENV, "1"))
    free = min(about.f_bavail * about.f_frsize, free_host_memory())
    if nbytes * ranks <= free:
        return ""
    return f"{size(nbytes * ranks)} are needed in {folder.parent} for the ranks of this node, {size(free)} are free"


# --- as a part ---------------------------------------------------------------------------------------------------


class _Shelf:
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

    def rows(self, tensors: Mapping[Key, torch.Tensor]) -> list[list[Any]]:
        """Return the keys of ``tensors``, each with its place."""
        return [list(row) for row in zip(tensors, self.put(tensors.values()), strict=True)]


def _content(estate: Estate, held: HeldState, own: OwnState) -> Content:
    """Return an estate as plain bytes and tensors, which are the same ones."""
    shelf = _Shelf()
    objects = {int(stage): moment.objects for stage, moment in held.moments.items()}
    skeleton, inside = state_tree.split({"moments": objects, "finished": dict(estate.finished)})
    start, streams = own.streams.data_start(), own.streams.states or {}
    plain: dict[str, Any] = {
        "format": _FORMAT,
        "committed": held.commit.committed,
        "fit": held.fit,
        "offset": held.offset,
        "begun": estate.begun,
        "saves": [[*save[:3], False] for save in estate.saves],
        "tensors": shelf.rows(held.tensors),
        "base": shelf.rows(estate.base),
        "moments": [[int(stage), shelf.rows(moment.buffers)] for stage, moment in held.moments.items()],
        "buffers": [[step, int(stage), shelf.rows(each)] for (step, stage), each in held.buffers.items()],
        "digests": None if held.digests is None else [[list(group), each] for group, each in held.digests.items()],
        "objects": skeleton,
        "inside": shelf.put(inside),
        "streams": [[step, states.to_bytes()] for (step, _), states in streams.items()],
        "data_start": start.to_bytes() if start is not None else None,
    }
    plain["devices"] = [tensor.device.type for tensor in shelf.tensors]
    return Content(state_tree.dumps(plain), tuple(tensor.detach() for tensor in shelf.tensors))


def _estate(content: Content, own: OwnState) -> Estate:
    """Return the estate that :func:`_content` made, its tensors in host memory, and put back what is a rank's own.

    Numbers, tensors without a dimension, and what the objects refer to are on the device on which they were.

    Raises:
        ValueError: it did not make this, or another version did.
    """
    try:
        plain = state_tree.loads(content.structure)
        if plain["format"] != _FORMAT:
            raise ValueError(f"it has the format {plain['format']}, and not {_FORMAT}")
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
            {Stage(stage): Moment(objects["moments"][stage], read(rows)) for stage, rows in plain["moments"]},
            None if plain["digests"] is None else {tuple(group): each for group, each in plain["digests"]},
            fit=plain["fit"],
            offset=plain["offset"],
            buffers={(step, Stage(stage)): read(rows) for step, stage, rows in plain["buffers"]},
        )
        states = [(step, RngStates.from_bytes(each)) for step, each in plain["streams"]]
        start = plain["data_start"]
        _put_back(own, held, states, None if start is None else RngStates.from_bytes(start))
        saves = tuple((number, step, stage, going_on) for number, step, stage, going_on in plain["saves"])
        return Estate(held, read(plain["base"]), plain["begun"], objects["finished"], saves)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"this is no state that a process has handed over: {error!r}") from error


def _put_back(
    own: OwnState, held: HeldState, states: Iterable[tuple[int, RngStates]], data_start: RngStates | None
) -> None:
    """Keep what is a rank's own, as the process before this one did."""
    own.streams.states = {(step, each.stage): each for step, each in states}
    if data_start is not None:
        own.streams.keep_data_start(data_start)
    for step, stage in held.buffers:
        own.buffers.record(step, stage, own_board())  # whether they have changed since the beginning
