"""A load strategy that takes chunks from copies first, and the rest from storage, each once for all ranks."""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import Metadata

from checkpointless.megatron.dist_checkpoint import identity as identities
from checkpointless.megatron.dist_checkpoint import storage
from checkpointless.megatron.dist_checkpoint.chunk import State, Strategy
from checkpointless.megatron.dist_checkpoint.copies import Copies, process_copies
from checkpointless.megatron.dist_checkpoint.delivery import deliver, deliveries_of, readers_of
from checkpointless.megatron.dist_checkpoint.identity import Identity
from checkpointless.megatron.dist_checkpoint.part import encoded, values_of
from checkpointless.megatron.dist_checkpoint.wanted import Encoded, Table, Wanted
from checkpointless.replication.agreement import LocalCheckpointError, agree, attempt, gather, own_rank
from checkpointless.replication.parts import Part
from checkpointless.replication.retrieval import Search, choose_parts
from checkpointless.replication.store import PartStore, StoredPart
from checkpointless.serialization.state_tree import Tree

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.base import LoadShardedStrategy
else:
    try:
        from megatron.core.dist_checkpointing.strategies.base import LoadShardedStrategy
    except ImportError:  # newer Megatron-core has no base classes, and only calls what it needs
        LoadShardedStrategy = object

logger = logging.getLogger(__name__)


class LoadError(CheckpointingException):
    """A checkpoint was not loaded, on no rank; the message says what is missing or damaged, and where."""


@dataclass(frozen=True)
class LoadReport:
    """Where the chunks of a load came from.

    Attributes:
        nbytes: the bytes of unique tensor chunks by where they came from: a place of copies, or ``storage``.
        chunks: how many unique chunks there were.
        seconds: how long the load took, in seconds.
    """

    nbytes: dict[str, int] = field(default_factory=dict)
    chunks: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        places = ", ".join(f"{nbytes} bytes from {place}" for place, nbytes in self.nbytes.items())
        return f"{self.chunks} chunks in {self.seconds:.2f} s: {places or 'no tensors'}"


class CopiesLoadStrategy(LoadShardedStrategy):
    """Loads a checkpoint from copies of it, and what they lack from storage by the strategy that it wraps.

    Each unique chunk comes from the memory of a living rank that saved it, else from the memory of a neighbour that
    keeps it for that rank, else from a lasting place, else from storage. There one rank reads it, whatever the
    number of ranks that need it, and sends it to them in digest-checked buckets. A copy is used only if it is one
    of exactly this checkpoint and of exactly the chunk that is asked for; if the model is cut differently than when
    it was saved, those chunks come from storage. All ranks of the job load together.

    A copy that is damaged costs a warning, and the next one is taken. If a chunk is nowhere, all ranks raise. What
    has been loaded by then is in the tensors of the sharded state, which are not to be used.

    Args:
        wrapped: loads from storage; None: Megatron's own strategy for ``torch_dist``.
        copies: the copies; None: those of this process.

    Attributes:
        report: what the newest load took from where; None before.
    """

    def __init__(self, wrapped: Strategy = None, copies: Copies | None = None) -> None:
        super().__init__()
        self.wrapped = _default() if wrapped is None else wrapped
        self.copies = process_copies() if copies is None else copies
        self.report: LoadReport | None = None

    def load(self, sharded_state_dict: State, checkpoint_dir: str | os.PathLike[str]) -> State:
        """Load the sharded part of a checkpoint. Collective.

        Args:
            sharded_state_dict: nested dicts and lists of Megatron-core's ``ShardedTensor`` and ``ShardedObject``.
            checkpoint_dir: the checkpoint.

        Returns:
            The state, with the loaded tensors and objects in the places of the leaves.

        Raises:
            LoadError: on every rank, if anything could not be loaded on any rank.
        """
        began_s = time.monotonic()
        wanted, places = Wanted(sharded_state_dict), [*self.copies.stores]
        mine, problem = attempt(lambda: identities.read(checkpoint_dir) if own_rank() == 0 else None)
        if problem is not None:
            logger.warning("copies of %s are not used: %s", checkpoint_dir, problem)
        told = gather({"wanted": wanted.told(), "identity": msgspec.to_builtins(mine), "places": places})
        if any(each["places"] != places for each in told):
            raise LoadError(f"the ranks keep copies in different places: {[each['places'] for each in told]}")
        identity = msgspec.convert(told[0]["identity"], Identity | None)
        table = Table.of([each["wanted"] for each in told])
        found = Found() if identity is None else find(self.copies.stores, identity, table.numbers)
        try:
            values, borrowed = self._gathered(wanted, table, found, checkpoint_dir)
            state, problem = attempt(lambda: wanted.loaded(values, borrowed))
            agree(problem, f"loading {checkpoint_dir}")
        except (LocalCheckpointError, storage.StorageError) as error:
            raise LoadError(str(error)) from error
        if identity is not None:
            self.copies.found(identity.save)
        rest = set(table.sizes) - set(found.places)
        nbytes = bytes_by_place(table.sizes, found.places, rest)
        self.report = LoadReport(nbytes, len(table.ids), time.monotonic() - began_s)
        if own_rank() == 0:
            logger.info("loaded %s, %s", checkpoint_dir, self.report)
        return state

    def _gathered(
        self, wanted: Wanted, table: Table, found: Found, checkpoint_dir: str | os.PathLike[str]
    ) -> tuple[dict[str, Any], frozenset[str]]:
        """Return what this rank wants, by id, and which of it belongs to copies. Collective."""
        rest = {chunk: size for chunk, size in table.sizes.items() if chunk not in found.sources}
        readers = readers_of(rest, table.needers)
        own = {each: wanted.leaf(table.ids[each]) for each, reader in readers.items() if reader == own_rank()}
        read = storage.read(self.wrapped, checkpoint_dir, own)
        opaque = self._read_opaque(wanted, table, read, checkpoint_dir)
        held = {**found.values, **{chunk: _sendable(chunk, value, table) for chunk, value in read.items()}}
        sources = {**found.sources, **readers}
        sent = deliveries_of({each: sources[each] for each in sources if each not in opaque}, table.needers)
        arrived, problem = attempt(lambda: deliver(sent, held, lambda chunk: wanted.room(table.ids[chunk])))
        agree(problem, f"bringing {checkpoint_dir} to all ranks")
        values = {table.ids[chunk]: value for chunk, value in {**found.values, **(arrived or {}), **read}.items()}
        for chunk in table.objects:
            id_ = table.ids[chunk]
            if id_ in values and chunk not in read:
                values[id_] = Encoded(values[id_])
        return values, frozenset(table.ids[chunk] for chunk in found.values)

    def _read_opaque(
        self, wanted: Wanted, table: Table, read: dict[int, Any], checkpoint_dir: str | os.PathLike[str]
    ) -> frozenset[int]:
        """Have objects that cannot be sent read by every rank that needs them, and return which they are."""
        told = gather([chunk for chunk in sorted(table.objects & read.keys()) if encoded(read[chunk]) is None])
        opaque = frozenset(chunk for each in told for chunk in each)
        if opaque:
            mine = [each for each in sorted(opaque) if own_rank() in table.needers[each] and each not in read]
            leaves = {each: wanted.leaf(table.ids[each]) for each in mine}
            read.update(storage.read(self.wrapped, checkpoint_dir, leaves))
        return opaque

    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> State:
        """Return what the wrapped strategy knows of the tensors in a checkpoint."""
        return self.wrapped.load_tensors_metadata(Path(checkpoint_dir))

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> State:
        """Return what the wrapped strategy knows of the tensors and objects in a checkpoint."""
        return self.wrapped.load_sharded_metadata(Path(checkpoint_dir))

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Let the wrapped strategy say whether it reads this backend."""
        self.wrapped.check_backend_compatibility(loaded_version)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Let the wrapped strategy say whether it reads this version."""
        self.wrapped.check_version_compatibility(loaded_version)

    def remove_sharded_tensors(self, checkpoint_dir: str | os.PathLike[str], key_prefix: str) -> None:
        """Let the wrapped strategy remove tensors whose keys begin with ``key_prefix``."""
        self.wrapped.remove_sharded_tensors(checkpoint_dir, key_prefix)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether objects are loaded, too; otherwise Megatron-core loads them by another strategy."""
        can = self.wrapped.can_handle_sharded_objects  # a property, or a method, by the strategy
        return bool(can() if callable(can) else can)

    @property
    def cached_global_metadata(self) -> Metadata | None:
        """The checkpoint's metadata, if the wrapped strategy has read them; saves may use them again."""
        return getattr(self.wrapped, "cached_global_metadata", None)


def _default() -> Strategy:
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    return TorchDistLoadShardedStrategy()


def _sendable(chunk: int, value: Any, table: Table) -> Any:
    return encoded(value) if chunk in table.objects else value


# --- what copies have ---------------------------------------------------------------------------------------------


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
