"""What ranks want to load: the chunks of each, and how they are numbered for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from checkpointless.megatron.dist_checkpoint.chunk import Chunk, Kind, Leaf, State, leaves_of, replaced
from checkpointless.megatron.dist_checkpoint.delivery import needers_of
from checkpointless.megatron.dist_checkpoint.part import decoded
from checkpointless.serialization.state_tree import Tree

if TYPE_CHECKING:
    from checkpointless.wire.plain import Json, Parsed


class Wanted:
    """What this rank wants: the leaves of a sharded state, by chunk.

    Args:
        state: the sharded state. It is not changed, but the tensors in it are loaded into.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.chunks: dict[str, Chunk] = {}
        self._leaves: dict[str, list[Leaf]] = defaultdict(list)
        self._id_of: dict[int, str] = {}  # by the identity of the leaf
        for leaf in leaves_of(state):
            chunk = Chunk.of(leaf)
            self.chunks[chunk.id] = chunk
            self._leaves[chunk.id].append(leaf)
            self._id_of[id(leaf)] = chunk.id

    def told(self) -> dict[str, Json]:
        """Return what the other ranks have to know: for each id, the bytes and whether it is an object."""
        return {id_: [chunk.nbytes, chunk.kind is Kind.OBJECT] for id_, chunk in self.chunks.items()}

    def leaf(self, id_: str) -> Leaf:
        """Return a leaf that stands for a chunk."""
        return self._leaves[id_][0]

    def room(self, id_: str) -> torch.Tensor | None:
        """Return the tensor that a chunk is to be loaded into; None: the sharded state has none."""
        data = self.leaf(id_).data
        return data if isinstance(data, torch.Tensor) else None

    def loaded(self, values: Mapping[str, Any], borrowed: frozenset[str]) -> State:
        """Return the sharded state with values in the places of its leaves.

        Args:
            values: the value of each chunk: a tensor, or an encoded object.
            borrowed: the chunks whose tensors are somebody else's, and have to be copied.
        """
        given: set[str] = set()

        def value_of(leaf: Leaf) -> Any:
            id_ = self._id_of[id(leaf)]
            value: Tree = values[id_]
            if not isinstance(value, torch.Tensor):
                return decoded(value) if isinstance(value, Encoded) else value
            is_taken = id_ in borrowed or id_ in given
            given.add(id_)
            return _into(leaf.data, value, is_taken)

        return replaced(self._state, value_of)


class Encoded(dict[str, Tree]):
    """An object as :func:`~checkpointless.megatron.dist_checkpoint.part.encoded` encoded it."""


@dataclass(frozen=True)
class Table:
    """What all ranks want. It is the same on all ranks.

    Attributes:
        ids: the ids of all chunks; the place of one is its number.
        sizes: the bytes of each chunk, by number.
        objects: the numbers of the chunks that are objects.
        needers: by number, the ranks that need the chunk.
    """

    ids: tuple[str, ...]
    sizes: dict[int, int]
    objects: frozenset[int]
    needers: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, everybodys: Sequence[Mapping[str, Parsed]]) -> Table:
        """Return the table of what each rank has told of its wishes."""
        about = {id_: facts for each in everybodys for id_, facts in each.items()}
        ids = tuple(sorted(about))
        numbers = {id_: number for number, id_ in enumerate(ids)}
        return cls(
            ids,
            {number: int(about[id_][0]) for number, id_ in enumerate(ids)},
            frozenset(number for number, id_ in enumerate(ids) if about[id_][1]),
            needers_of([[numbers[id_] for id_ in each] for each in everybodys]),
        )

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each id."""
        return {id_: number for number, id_ in enumerate(self.ids)}


def _into(target: Any, value: torch.Tensor, is_taken: bool) -> torch.Tensor:
    """Return ``value`` in ``target``, if there is one, or else itself, or a copy if it belongs to somebody."""
    if not isinstance(target, torch.Tensor):
        return value.clone() if is_taken else value
    if target.data_ptr() == value.data_ptr() and target.device == value.device:
        return value
    place = target.detach()
    place.copy_(value)
    return place
