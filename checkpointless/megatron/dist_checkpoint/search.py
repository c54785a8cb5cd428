"""Look for chunks in the places where copies are kept. All ranks look together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from checkpointless.megatron.dist_checkpoint.identity import Identity
from checkpointless.megatron.dist_checkpoint.part import values_of
from checkpointless.replication.agreement import gather
from checkpointless.replication.parts import Part
from checkpointless.replication.retrieval import Search, choose_parts
from checkpointless.replication.store import PartStore, StoredPart
from checkpointless.serialization.state_tree import Tree


@dataclass
class Found:
    """Chunks that were found. ``sources`` and ``places`` are the same on all ranks.

    Attributes:
        sources: by chunk, the rank that has it.
        places: by chunk, the name of the place that it is from.
        values: the chunks that this rank has, with their values. They are not to be changed.
        parts: the parts that they are from, whose memory is not used again as long as somebody holds them.
    """

    sources: dict[int, int] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    values: dict[int, Tree] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)


def find(stores: Mapping[str, PartStore], identity: Identity, numbers: Mapping[str, int]) -> Found:
    """Find chunks of a checkpoint in places, the first places first. Collective.

    A part is read by one rank, first by the one that wrote it. If its copy is damaged, another copy is read, with a
    warning, on this rank, then on another one, then in the next place.

    Args:
        stores: the places, the same on all ranks by their names.
        identity: of the checkpoint.
        numbers: the number of each chunk that some rank needs, by the chunk's id.
    """

    def read(copy: StoredPart, is_own: bool) -> tuple[Part, dict[int, Tree]]:
        part = copy.read(is_shared=True)
        values = values_of(part.content, identity)
        return part, {numbers[id_]: value for id_, value in values.items() if id_ in numbers}

    search = Search(stores, identity.world_size, read)
    places = [*stores]
    choice, mine = search.read(lambda unusable: choose_parts(search.holdings, places, identity.save, unusable))
    told = gather([[number, sorted(mine[copy][1])] for number, copy in enumerate(choice.copies) if copy in mine])
    found = Found(parts=[part for part, _ in mine.values()])
    for number, chunks in sorted(pair for pairs in told for pair in pairs):
        copy = choice.copies[number]
        for chunk in chunks:
            if chunk not in found.sources:
                found.sources[chunk], found.places[chunk] = copy.holder, copy.place
                if copy in mine:
                    found.values[chunk] = mine[copy][1][chunk]
    return found


def bytes_by_place(sizes: Mapping[int, int], places: Mapping[int, str], rest: Collection[int]) -> dict[str, int]:
    """Return how many bytes of unique chunks came from where; the ``rest`` came from ``storage``."""
    counted: dict[str, int] = defaultdict(int)
    for chunk, place in places.items():
        counted[place] += sizes[chunk]
    for chunk in rest:
        counted["storage"] += sizes[chunk]
    return {place: nbytes for place, nbytes in counted.items() if nbytes}
