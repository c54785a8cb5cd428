"""Look for chunks in the places where copies are kept, one place after the other. All ranks look together."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from checkpointless.local_checkpoint.agreement import attempt, gather, own_rank
from checkpointless.local_checkpoint.memory_storage import KeptPart
from checkpointless.local_checkpoint.part_storage import StoredPart, usable
from checkpointless.megatron.dist_checkpoint.copies import Place
from checkpointless.megatron.dist_checkpoint.identity import Identity
from checkpointless.megatron.dist_checkpoint.part import values_of
from checkpointless.megatron.dist_checkpoint.plan import part_readers
from checkpointless.serialization.state_tree import Tree

logger = logging.getLogger(__name__)


@dataclass
class Found:
    """Chunks that were found. All but ``values`` is the same on all ranks.

    Attributes:
        sources: by chunk, the rank that has it.
        places: by chunk, the name of the place that it is from.
        values: the chunks that this rank has, with their values. They are not to be changed.
    """

    sources: dict[int, int] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    values: dict[int, Tree] = field(default_factory=dict)


def find(places: Sequence[Place], identity: Identity, numbers: Mapping[str, int]) -> Found:
    """Find chunks of a checkpoint in places, the first places first. Collective.

    A part is read by one rank, first by the one that wrote it. If its copy is damaged, another copy is read, with a
    warning, on this rank, then on another one, then in the next place.

    Args:
        places: the places, the same on all ranks by their names.
        identity: of the checkpoint.
        numbers: the number of each chunk that some rank needs, by the chunk's id.
    """
    found = Found()
    parts_read: set[int] = set()
    for place in places:
        if len(found.sources) == len(numbers):
            break
        shelf, problem = attempt(partial(place.storage.shelf, own_rank(), identity.world_size))
        if problem is not None:
            logger.warning("rank %d cannot look at the copies in %s: %s", own_rank(), place.name, problem)
        copies = (shelf or {}).get(identity.save, {})
        shelves = gather(sorted(copies))
        failed: set[tuple[int, int]] = set()
        while readers := part_readers(shelves, parts_read, failed):
            mine = {part: copies[part] for part, rank in readers.items() if rank == own_rank()}
            told = gather(_read(mine, identity, numbers, found))
            for part, rank in readers.items():
                chunks = told[rank][str(part)]
                if chunks is None:
                    failed.add((part, rank))
                    continue
                parts_read.add(part)
                for chunk in chunks:
                    found.sources[chunk], found.places[chunk] = rank, place.name
    return found


def _read(
    parts: Mapping[int, Sequence[StoredPart]], identity: Identity, numbers: Mapping[str, int], found: Found
) -> dict[str, list[int] | None]:
    """Read parts, and put what is needed of them to what was found.

    Returns:
        By part, the chunks that it has and that are new; None: no copy of it can be used.
    """
    told: dict[str, list[int] | None] = {}
    taken = set(found.sources)
    for part, copies in parts.items():
        read = (usable(lambda copy: _values(copy, identity), copy) for copy in copies)
        values = next((each for each in read if each is not None), None)
        if values is None:
            told[str(part)] = None
            continue
        new = {numbers[each]: value for each, value in values.items() if numbers.get(each, -1) not in {-1, *taken}}
        taken |= new.keys()
        found.values.update(new)
        told[str(part)] = sorted(new)
    return told


def _values(copy: StoredPart, identity: Identity) -> dict[str, Tree]:
    if isinstance(copy, KeptPart):  # nobody changes it, so it need not be copied
        copy.verify()
        return values_of(copy.content, identity)
    return values_of(copy.read(), identity)


def bytes_by_place(sizes: Mapping[int, int], places: Mapping[int, str], rest: Collection[int]) -> dict[str, int]:
    """Return how many bytes of unique chunks came from where; the ``rest`` came from ``storage``."""
    counted: dict[str, int] = defaultdict(int)
    for chunk, place in places.items():
        counted[place] += sizes[chunk]
    for chunk in rest:
        counted["storage"] += sizes[chunk]
    return {place: nbytes for place, nbytes in counted.items() if nbytes}
