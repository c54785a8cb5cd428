"""A load strategy that takes chunks from copies first, and the rest from storage, each once for all ranks."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.api import CheckpointException

from checkpointless.integrations.megatron.dist_checkpoint.copies import Copies, process_copies
from checkpointless.integrations.megatron.dist_checkpoint.part import (
    Chunk,
    Identity,
    Kind,
    Leaf,
    State,
    Strategy,
    decoded,
    encoded,
    leaves_of,
    read_identity,
    replaced,
    values_of,
)
from checkpointless.replication.agreement import (
    LocalCheckpointError,
    agree,
    attempt,
    by_rank,
    gather,
    own_rank,
    world_size,
)
from checkpointless.replication.parts import Part
from checkpointless.replication.retrieval import Search, all_of, choose_parts
from checkpointless.replication.store import PartStore, StoredPart
from checkpointless.state.serialization.state_tree import Tree
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import Fill, receive_state, send_state

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.base import LoadShardedStrategy

    from checkpointless.launcher.protocol.causes import Json, Parsed
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
        mine, problem = attempt(lambda: read_identity(checkpoint_dir) if own_rank() == 0 else None)
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
        except (LocalCheckpointError, StorageError) as error:
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
        read = read_from_storage(self.wrapped, checkpoint_dir, own)
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
            read.update(read_from_storage(self.wrapped, checkpoint_dir, leaves))
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


# --- reading from storage by the wrapped strategy, each chunk on one rank -----------------------------------------


_T = TypeVar("_T")
_ELSEWHERE = "it failed on another rank"


class StorageError(RuntimeError):
    """Chunks cannot be read from storage; the message says on which rank, and why."""


def read_from_storage(
    wrapped: Strategy, checkpoint_dir: str | os.PathLike[str], leaves: Mapping[int, Leaf]
) -> dict[int, Any]:
    """Read this rank's share, if the checkpoint has those of all: Megatron's loads wait for each other. Collective.

    Args:
        wrapped: the load strategy.
        checkpoint_dir: the checkpoint.
        leaves: by number, what this rank reads.

    Returns:
        The values: tensors, in the leaves' own if they have any, and objects.

    Raises:
        StorageError: on every rank, if something cannot be read on any rank.
    """
    asked = {str(number): copy.copy(leaf) for number, leaf in leaves.items()}
    _together(lambda: _look_up(wrapped, checkpoint_dir, leaves.values()), checkpoint_dir)
    values: dict[str, Any] | None = _together(lambda: wrapped.load(asked, Path(checkpoint_dir)), checkpoint_dir)
    return {int(number): value for number, value in (values or {}).items()}


def _together(do: Callable[[], _T], checkpoint_dir: str | os.PathLike[str]) -> _T | None:
    found, problem = attempt_megatrons(do)
    words = told_by(f"loading {checkpoint_dir}", problem)
    if words:
        raise StorageError(words) from problem
    return found


def _look_up(wrapped: Strategy, checkpoint_dir: str | os.PathLike[str], leaves: Collection[Leaf]) -> None:
    """Raise if a checkpoint lacks what this rank reads."""
    there = wrapped.load_sharded_metadata(Path(checkpoint_dir)) if leaves else {}
    for leaf in leaves:
        if (leaf.unique_key if isinstance(leaf, ShardedObject) else leaf.key) not in there:
            raise LookupError(
                f"{Chunk.of(leaf).words} is in no copy and not in the checkpoint: check that the model is the one "
                "that was saved, or load with a strictness that leaves out what is missing"
            )


def told_by(doing: str, problem: Exception | None) -> str:
    """Return one line about what went wrong on any rank; "" if nothing did. Collective.

    Args:
        doing: what the ranks were doing.
        problem: what went wrong on this rank.
    """
    told = gather("" if problem is None else line_of(problem))
    known = ["" if each == _ELSEWHERE else each for each in told]
    return by_rank(doing, known if any(known) else told) if any(told) else ""


def attempt_megatrons(do: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Return what a function of Megatron's returned, or what it raised, as ``attempt`` does.

    Torch's exception for what several ranks raised is none that ``except Exception`` catches.
    """

    def calmly() -> _T:
        try:
            return do()
        except CheckpointException as error:
            raise StorageError(line_of(error)) from error

    return attempt(calmly)


def line_of(error: BaseException) -> str:
    """Return one line about an error; of torch's, which holds those of several ranks, the first one."""
    if isinstance(error, CheckpointException):
        if not error.failures:
            return _ELSEWHERE  # only the rank that coordinates is told
        rank, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {line_of(first)}"
    text = " ".join(str(error).split())
    return text if type(error) in (LookupError, StorageError) else f"{type(error).__name__}: {text}"


# --- who reads and sends what: pure functions of plain values, equal on all ranks ---------------------------------


@dataclass(frozen=True, order=True)
class Delivery:
    """What one rank sends to another one.

    Attributes:
        source: the rank that has the chunks.
        destination: the rank that needs them.
        chunks: the chunks, ascending.
    """

    source: int
    destination: int
    chunks: tuple[int, ...]


def needers_of(needs: Sequence[Collection[int]]) -> dict[int, tuple[int, ...]]:
    """Return, by chunk, the ranks that need it, ascending.

    Args:
        needs: by rank, the chunks that it needs.
    """
    needers: dict[int, list[int]] = defaultdict(list)
    for rank, chunks in enumerate(needs):
        for chunk in chunks:
            needers[chunk].append(rank)
    return {chunk: tuple(ranks) for chunk, ranks in sorted(needers.items())}


def readers_of(sizes: Mapping[int, int], candidates: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Return, by chunk, the one rank that reads it, so that all ranks read about equally much.

    The largest chunks are assigned first, each to the candidate with the fewest bytes so far. So no rank reads
    more than its even share and one chunk, if every rank is a candidate for every chunk.

    Args:
        sizes: bytes of each chunk.
        candidates: for each chunk, the ranks that could read it, at least one.
    """
    load: dict[int, int] = defaultdict(int)
    readers = {}
    for chunk in sorted(sizes, key=lambda each: (-sizes[each], each)):
        reader = min(candidates[chunk], key=lambda rank: (load[rank], rank))
        readers[chunk] = reader
        load[reader] += max(1, sizes[chunk])
    return readers


def deliveries_of(sources: Mapping[int, int], needers: Mapping[int, Collection[int]]) -> tuple[Delivery, ...]:
    """Return what has to be sent, so that every rank has each chunk that it needs.

    Args:
        sources: by chunk, the rank that has it.
        needers: by chunk, the ranks that need it.
    """
    chunks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for chunk, source in sources.items():
        for rank in needers.get(chunk, ()):
            if rank != source:
                chunks[source, rank].append(chunk)
    return tuple(Delivery(*ends, tuple(sorted(each))) for ends, each in sorted(chunks.items()))


def rounds_of(deliveries: Sequence[Delivery], world_size: int) -> tuple[tuple[Delivery, ...], ...]:
    """Sort deliveries into rounds in which no rank takes part twice, so that many pairs work at the same time.

    Every rank goes through its rounds in their order. So a rank that waits, waits for one that is not further, and
    no ranks wait for each other in a circle. Pairs that are equally far apart come one after the other, which keeps
    the rounds few when all ranks send to all others.

    Args:
        deliveries: what has to be sent.
        world_size: the number of ranks.
    """
    busy = [0] * world_size  # by rank, a bit for each round that it takes part in
    rounds: list[list[Delivery]] = []

    def distance(each: Delivery) -> tuple[int, int]:
        return (each.destination - each.source) % world_size, each.source

    for each in sorted(deliveries, key=distance):
        taken = busy[each.source] | busy[each.destination]
        number = (~taken & (taken + 1)).bit_length() - 1  # the first round in which both ends are free
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(each)
        busy[each.source] |= 1 << number
        busy[each.destination] |= 1 << number
    return tuple(tuple(each) for each in rounds)


# --- sending ------------------------------------------------------------------------------------------------------


def deliver(
    deliveries: Sequence[Delivery], values: Mapping[int, Tree], room: Callable[[int], torch.Tensor | None]
) -> dict[int, Tree]:
    """Carry deliveries out, those of many pairs of ranks at the same time. All ranks are given the same.

    Args:
        deliveries: what has to be sent.
        values: what this rank has: tensors, and encoded objects.
        room: returns the tensor that a chunk's bytes go to; None: it goes to a new one, on the CPU.

    Returns:
        What arrived, by chunk.

    Raises:
        TransferError: something arrived damaged and could not be mended; all other deliveries were made.
    """
    arrived: dict[int, Tree] = {}

    def carry_out(delivery: Delivery) -> None:
        if delivery.source == own_rank():
            _send(delivery, values)
        else:
            arrived.update(_receive(delivery, room))

    rounds = rounds_of(deliveries, world_size())
    all_of(carry_out, [each for one in rounds for each in one if own_rank() in (each.source, each.destination)])
    return arrived


def _send(delivery: Delivery, values: Mapping[int, Tree]) -> None:
    tensors: dict[Key, torch.Tensor] = {}
    objects: dict[str, Tree] = {}
    for chunk in delivery.chunks:
        value = values[chunk]
        if isinstance(value, torch.Tensor):
            tensors[(chunk,)] = value.detach()
        else:
            objects[str(chunk)] = value
    send_state(tensors, objects, [Fill(delivery.destination, 0, 1)])


def _receive(delivery: Delivery, room: Callable[[int], torch.Tensor | None]) -> dict[int, Tree]:
    arrived: dict[int, Tree] = {}

    def allocate(entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
        given: dict[Key, torch.Tensor] = {}
        for entry in entries:
            chunk = int(entry.key[0])
            place = room(chunk)
            given[entry.key] = torch.empty(entry.shape, dtype=entry.dtype) if place is None else place.detach()
            arrived[chunk] = given[entry.key]
        return given

    objects, _ = receive_state([delivery.source], allocate)
    arrived.update({int(chunk): value for chunk, value in objects.items()})
    return arrived


# --- what ranks want to load --------------------------------------------------------------------------------------


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
    """An object as :func:`~checkpointless.integrations.megatron.dist_checkpoint.part.encoded` encoded it."""


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
        """Return the table of what each rank has reported as its wishes."""
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
