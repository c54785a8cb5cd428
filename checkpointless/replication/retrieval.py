"""Brings parts to where they are wanted: all ranks choose alike, read what they have to, and send it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from checkpointless.inprocess.communicators.helper_thread import run_in_helper_thread
from checkpointless.replication.agreement import gather, own_rank
from checkpointless.replication.parts import Content, Part, PartError, PartId, SaveId
from checkpointless.replication.store import PartStore, StoredPart
from checkpointless.state.serialization.state_tree import Tree
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import Fill, TransferError, receive_state, send_state

logger = logging.getLogger(__name__)

ANSWER_S = 30.0  # a place that does not answer for so long is taken for gone
_HOST = torch.device("cpu")
_READ_S = 600.0  # a hundred gigabytes take so long at 170 MB/s

_T = TypeVar("_T")


# --- which copies: pure functions of what the ranks say that they have --------------------------------------------


@dataclass(frozen=True, order=True)
class Copy:
    """One copy of one rank's state."""

    place: str
    holder: int
    part: PartId


@dataclass(frozen=True)
class Choice:
    """What ranks are filled from; no ``save``: none is whole, and ``lacking`` are ranks missing in newer ones."""

    save: SaveId | None = None
    copies: tuple[Copy, ...] = ()
    lacking: Mapping[SaveId, Sequence[int]] = field(default_factory=dict)


#: What each rank has: by the name of the place, the parts that the rank can read, its own and others'.
Holdings = Sequence[Mapping[str, Collection[PartId]]]


def choose(
    holdings: Holdings, places: Sequence[str], is_of_use: Callable[[SaveId], bool], unusable: Collection[Copy] = ()
) -> Choice:
    """Choose the newest save of use of which every rank's part exists, and for each rank the cheapest copy."""
    found, ranks = _usable_copies(holdings, places, unusable), range(len(holdings))
    lacking: dict[SaveId, Sequence[int]] = {}
    for save in sorted(filter(is_of_use, found), reverse=True):
        missing = [rank for rank in ranks if rank not in found[save]]
        if not missing:
            copies = {rank: found[save][rank] for rank in ranks}
            return Choice(save, _cheapest(copies, places), lacking)
        if len(missing) < len(ranks):  # else there are parts of other ranks only
            lacking[save] = missing
    return Choice(lacking=lacking)


def choose_parts(
    holdings: Holdings, places: Sequence[str], save: SaveId, unusable: Collection[Copy] = ()
) -> Choice:
    """Choose the cheapest copy of each part of a save that any rank has, however many ranks there were."""
    return Choice(save, _cheapest(_usable_copies(holdings, places, unusable)[save], places))


def _usable_copies(
    holdings: Holdings, places: Sequence[str], unusable: Collection[Copy]
) -> Mapping[SaveId, Mapping[int, Sequence[Copy]]]:
    """Return the copies of each part of each save."""
    found: dict[SaveId, dict[int, list[Copy]]] = defaultdict(lambda: defaultdict(list))
    for holder, holding in enumerate(holdings):
        for place in places:
            for copy in (Copy(place, holder, part) for part in holding.get(place, ())):
                if copy not in unusable:
                    found[copy.part.save][copy.part.part].append(copy)
    return found


def _cheapest(copies: Mapping[int, Sequence[Copy]], places: Sequence[str]) -> tuple[Copy, ...]:
    """Return a copy of each part, in order, best by place, then of its own rank; other ranks take turns."""
    duties: dict[int, int] = defaultdict(int)
    chosen = []
    for part in sorted(copies, key=lambda each: (all(copy.holder != each for copy in copies[each]), each)):

        def price(copy: Copy, part: int = part) -> tuple[int, bool, int, int]:
            return places.index(copy.place), copy.holder != part, duties[copy.holder], copy.holder

        best = min(copies[part], key=price)
        duties[best.holder] += best.holder != part
        chosen.append(best)
    return tuple(sorted(chosen, key=lambda copy: copy.part))


# --- reading them -------------------------------------------------------------------------------------------------


class Search(Generic[_T]):
    """Looks for parts in the places of all ranks. Making one, and each call, is a collective.

    ``read`` makes of a copy what is wanted, given whether this rank's state comes from it; ``living``: what it has
    without reading. ``PartError`` or ``OSError``: it cannot be used.
    """

    def __init__(
        self,
        stores: Mapping[str, PartStore],
        world_size: int,
        read: Callable[[StoredPart, bool], _T],
        living: Mapping[str, Collection[PartId]] | None = None,
    ) -> None:
        self._read = read
        self._shelves = {name: _shelf(name, store, world_size) for name, store in stores.items()}
        mine = {**self._shelves, **(living or {})}
        told = gather({name: sorted(map(str, parts)) for name, parts in mine.items()})
        self.holdings: Holdings = [
            {name: [PartId.parse(part) for part in parts] for name, parts in each.items()} for each in told
        ]

    def read(self, choose: Callable[[Collection[Copy]], Choice]) -> tuple[Choice, dict[Copy, _T]]:
        """Choose copies on all ranks alike and read this rank's share, again without damaged ones. Collective."""
        unusable: set[Copy] = set()
        found: dict[Copy, _T] = {}
        while True:
            choice = choose(unusable)
            mine = [
                (number, copy)
                for number, copy in enumerate(choice.copies)
                if copy.holder == own_rank() and copy.place in self._shelves
            ]
            found = {copy: found[copy] for _, copy in mine if copy in found}
            for _, copy in mine:
                value = None if copy in found else self._read_one(copy)
                if value is not None:
                    found[copy] = value
            failed = gather([number for number, copy in mine if copy not in found])
            if not any(failed):
                return choice, found
            unusable |= {choice.copies[number] for numbers in failed for number in numbers}

    def _read_one(self, copy: Copy) -> _T | None:
        """Read one copy; None, with a warning, if it is damaged or its place does not answer."""

        is_own = copy.part.part == own_rank()

        def first() -> _T | None:
            copies = self._shelves[copy.place][copy.part]
            read = (_usable(lambda each: self._read(each, is_own), each) for each in copies)
            return next((value for value in read if value is not None), None)

        try:
            return run_in_helper_thread(first, _READ_S)
        except TimeoutError as error:
            logger.warning("%s: %s is taken for missing: %s", copy.place, copy.part.words, error)
            return None


def _usable(read: Callable[[StoredPart], _T], copy: StoredPart) -> _T | None:
    """Return what ``read`` makes of a copy, or None, with a warning, if the copy cannot be used."""
    try:
        return read(copy)
    except FileNotFoundError:
        return None  # another rank of the node has just deleted what no rank needs any more
    except (OSError, PartError) as error:
        logger.warning("a copy is taken for missing: %s", error)
        return None


def _shelf(name: str, store: PartStore, world_size: int) -> dict[PartId, Sequence[StoredPart]]:
    """Return the parts of a place that this rank can read; none, with a warning, if the place cannot be read."""
    try:
        shelf = run_in_helper_thread(lambda: store.shelf(world_size), ANSWER_S)
    except Exception as error:  # noqa: BLE001 - of a store of the user's own, too
        logger.warning("%s: rank %d cannot look at its copies: %s", name, own_rank(), error)
        return {}
    return {PartId(save, part): stored for save, parts in shelf.items() for part, stored in parts.items()}


# --- sending them -------------------------------------------------------------------------------------------------


def bring(choice: Choice, read: Mapping[Copy, Part]) -> tuple[Content | None, int]:
    """Give every rank its part; return this one's, if read, and bytes from others; raise at the end. Collective."""
    deliveries = [
        Delivery(copy.holder, copy.part.part, (str(copy.part),))
        for copy in choice.copies
        if copy.holder != copy.part.part
    ]
    arrived = deliver(deliveries, {str(copy.part): part.content for copy, part in read.items()})
    own = next((part.content for copy, part in read.items() if copy.part.part == own_rank()), None)
    mine: Content | None = next(iter(arrived.values()), own)
    return mine, 0 if own is mine or mine is None else mine.nbytes


class Delivery(NamedTuple):
    """Values that one rank sends to another one, by their names."""

    source: int
    destination: int
    names: Sequence[str]


def deliver(
    deliveries: Sequence[Delivery],
    values: Mapping[str, Content | Tree],
    room: Callable[[str], torch.Tensor | None] = lambda name: None,
    device: torch.device = _HOST,
) -> dict[str, Any]:
    """Make this rank's deliveries, in one order on all ranks, in a thread; return what arrived, by name.

    Damage in one is raised after all: others wait for the next. ``room`` is where one goes (None: new, on
    ``device``).
    """
    arrived: dict[str, Any] = {}
    problems: list[TransferError | ValueError] = []
    mine = [each for each in deliveries if own_rank() in (each.source, each.destination)]

    def make_all() -> None:
        for each in mine:
            try:
                if each.source == own_rank():
                    _send(each, values)
                else:
                    arrived.update(_receive(each, room, device))
            except (TransferError, ValueError) as error:
                logger.warning("what rank %d sends arrived incomplete: %s", each.source, error)
                problems.append(error)

    if mine and dist.is_initialized():
        run_in_helper_thread(make_all)
    if problems:
        raise problems[0]
    return arrived


def _send(delivery: Delivery, values: Mapping[str, Content | Tree]) -> None:
    tensors: dict[Key, torch.Tensor] = {}
    plain: dict[str, Tree] = {}
    for name in delivery.names:
        value = values[name]
        if isinstance(value, torch.Tensor):
            tensors[(name,)] = value.detach()
        elif isinstance(value, Content):
            tensors |= {(name, index): tensor for index, tensor in enumerate(value.tensors)}
            plain[name] = value.structure  # bytes, which no other plain value is
        else:
            plain[name] = value
    send_state(tensors, plain, [Fill(delivery.destination, 0, 1)])


def _receive(
    delivery: Delivery, room: Callable[[str], torch.Tensor | None], device: torch.device
) -> dict[str, Content | Tree]:
    tensors: dict[Key, torch.Tensor] = {}

    def allocate(entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
        for entry in entries:
            place = room(str(entry.key[0]))
            new = torch.empty(entry.shape, dtype=entry.dtype, device=device) if place is None else place.detach()
            tensors[entry.key] = new
        return tensors

    plain, _ = receive_state([delivery.source], allocate)
    parts: dict[str, list[torch.Tensor]] = defaultdict(list)
    for (name, *index), tensor in tensors.items():
        if index:
            parts[str(name)].append(tensor)
    arrived: dict[str, Content | Tree] = {str(name): each for (name, *index), each in tensors.items() if not index}
    for name, value in plain.items():
        arrived[name] = Content(value, tuple(parts[name])) if isinstance(value, bytes) else value
    return arrived
