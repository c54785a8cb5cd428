"""Fills every rank from copies of one step: all ranks choose alike, read what they have to, and send it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from checkpointless.inprocess.context import aside
from checkpointless.inprocess.facts import Facts
from checkpointless.local_checkpoint.agreement import gather
from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.part_id import PartId, SaveId
from checkpointless.local_checkpoint.part_storage import StoredPart, read_any
from checkpointless.local_checkpoint.part_transfer import receive_part, send_part
from checkpointless.recovery.tiers.choice import Choice, Copy, Holding, choose
from checkpointless.recovery.tiers.copies import ANSWER_S, Copies
from checkpointless.recovery.tiers.lane import within
from checkpointless.recovery.tiers.snapshot import Snapshot
from checkpointless.telemetry.event_names import LIVING
from checkpointless.transfer.transfer import Fill

logger = logging.getLogger(__name__)

_READ_S = 600.0  # a hundred gigabytes take so long at 170 MB/s

_HOST = torch.device("cpu")
_Shelves = Mapping[str, Mapping[PartId, Sequence[StoredPart]]]


@dataclass(frozen=True)
class Retrieved:
    """What a recovery is made of.

    Attributes:
        choice: the step, and the copy that each rank is filled from; or why there is none.
        snapshot: this rank's state; None: it lives in it already, or there is none.
        nbytes: how many bytes of it came from another rank.
    """

    choice: Choice
    snapshot: Snapshot | None = None
    nbytes: int = 0


def retrieve(copies: Copies, living: int | None, facts: Facts | None) -> Retrieved:
    """Choose the newest step of which every rank's state exists, and get this rank's. Collective.

    Args:
        copies: what this rank has.
        living: the step after which this rank has its state, as it was when copies were made; None: it has none.
        facts: what outlives this rank's process.

    Raises:
        UnrecoverableError: a tier cannot be used on some rank.
        TransferError: a copy arrived damaged and could not be mended.
    """
    lineage = copies.agree(facts)
    copies.open()
    shelves = {tier.name: _shelf(copies, tier.name) for tier in copies.tiers}
    save = lineage.save(living) if living is not None else None
    mine = {name: sorted(map(str, shelf)) for name, shelf in shelves.items()}
    told = gather([None if save is None else str(save), mine])
    holdings = [
        Holding(
            None if each[0] is None else SaveId.parse(each[0]),
            {name: [PartId.parse(part) for part in parts] for name, parts in each[1].items()},
        )
        for each in told
    ]
    unusable: set[Copy] = set()
    read: dict[Copy, Content] = {}
    while True:
        choice = choose(holdings, [tier.name for tier in copies.tiers], lineage.has, unusable)
        if choice.save is None:
            return Retrieved(choice)
        read = _read(choice.copies, shelves, read)
        failed = [
            place
            for place, copy in enumerate(choice.copies)
            if copy.tier != LIVING and copy.holder == dist.get_rank() and copy not in read
        ]
        damaged = {place for places in gather(failed) for place in places}
        if not damaged:
            break
        unusable |= {choice.copies[place] for place in damaged}
    content, nbytes = aside(lambda: _send_and_receive(choice.copies, read))
    return Retrieved(choice, None if content is None else Snapshot.of(content), nbytes)


def _shelf(copies: Copies, tier: str) -> dict[PartId, Sequence[StoredPart]]:
    """Return the parts of a tier that this rank can read; none, with a warning, if the place cannot be read."""
    storage, rank, world = copies.storage(tier), dist.get_rank(), dist.get_world_size()
    try:
        shelf = within(ANSWER_S, lambda: storage.shelf(rank, world))
    except (OSError, TimeoutError) as error:
        logger.warning("%s: rank %d cannot look at its copies: %s", tier, dist.get_rank(), error)
        return {}
    return {PartId(save, part): stored for save, parts in shelf.items() for part, stored in parts.items()}


def _read(chosen: Collection[Copy], shelves: _Shelves, known: Mapping[Copy, Content]) -> dict[Copy, Content]:
    """Read the chosen copies that are this rank's to read, unless they are known; damaged ones are left out."""
    found: dict[Copy, Content] = {}
    for copy in chosen:
        if copy.tier == LIVING or copy.holder != dist.get_rank():
            continue
        content = known.get(copy) or _read_one(copy, shelves[copy.tier][copy.part])
        if content is not None:
            found[copy] = content
    return found


def _read_one(copy: Copy, stored: Sequence[StoredPart]) -> Content | None:
    """Read one copy; None, with a warning, if it is damaged or its place does not answer."""
    try:
        return within(_READ_S, lambda: read_any(stored))
    except TimeoutError as error:
        logger.warning("%s: %s is taken for missing: %s", copy.tier, copy.part.words, error)
        return None


def _send_and_receive(chosen: Sequence[Copy], read: Mapping[Copy, Content]) -> tuple[Content | None, int]:
    """Send what others are filled from, and return what fills this rank, in one order on all ranks."""
    rank = dist.get_rank()
    own, nbytes = None, 0
    for copy in chosen:
        receiver = copy.part.part
        if copy.tier == LIVING or rank not in (receiver, copy.holder):
            continue
        if copy.holder == receiver:
            own = read[copy]
        elif rank == copy.holder:
            send_part(read[copy], str(copy.part), [Fill(receiver, 0, 1)])
        else:
            own, _ = receive_part([copy.holder], _HOST)
            nbytes = own.nbytes
    return own, nbytes
