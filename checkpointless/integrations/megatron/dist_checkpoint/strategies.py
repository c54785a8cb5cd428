"""Strategies that save and load Megatron's ``torch_dist`` checkpoints with copies of what each rank writes.

A part is what one rank writes, in chunks; a small file next to Megatron's own says which save a checkpoint is of.
"""

from __future__ import annotations

import copy
import io
import logging
import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
import torch
import xxhash
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from checkpointless.integrations.megatron.dist_checkpoint.copies import Copies, process_copies
from checkpointless.launcher.protocol.causes import Json, Parsed
from checkpointless.replication.agreement import (
    LocalCheckpointError,
    attempt,
    by_rank,
    gather,
    own_rank,
    together,
    words,
    world_size,
)
from checkpointless.replication.parts import Content, Part, PartError, SaveId
from checkpointless.replication.retrieval import Delivery, Search, choose_parts, deliver
from checkpointless.replication.store import PartStore, StoredPart
from checkpointless.state.serialization.state_tree import Tree
from checkpointless.state.serialization.tensor_memory import dtype_name, dtype_of
from checkpointless.system.patches import Patch, Patches

logger = logging.getLogger(__name__)

_PLAIN = "plain"
_STREAM = "stream"  # TransformerEngine's extra state, which only it reads


def _values_to_keep(leaves: Sequence[Leaf]) -> list[tuple[Leaf, Tree]]:
    """Return the leaves that can be kept, with tensor or encoded object; not, for example, tensors in FP8."""
    found = [(leaf, leaf.data if isinstance(leaf.data, torch.Tensor) else _encoded(leaf.data)) for leaf in leaves]
    return [(leaf, value) for leaf, value in found if value is not None and _can_keep(value)]


def _content_of(identity: _Identity, kept: Sequence[tuple[Leaf, Tree]]) -> Content:
    """Return a part of what :func:`_values_to_keep` returned, whose tensors are referenced and not copied."""
    about = msgspec.msgpack.encode((identity, [_Chunk.of(leaf) for leaf, _ in kept]))
    return Content.of({"about": about, "values": [value for _, value in kept]})


def _values_of(content: Content, identity: _Identity) -> dict[str, Tree]:
    """Return a part's values by the ids of their chunks; raise ``PartError`` if it is of another checkpoint."""
    try:
        state = content.state()
        theirs, chunks = msgspec.msgpack.decode(state["about"], type=tuple[_Identity, list[_Chunk]])
        values = dict(zip([each.id for each in chunks], state["values"], strict=True))
    except (ValueError, KeyError, TypeError) as error:
        raise PartError(f"a part of {identity.save} is no part of a torch_dist checkpoint: {error}") from error
    if theirs != identity:
        raise PartError(f"a part is of the checkpoint {theirs.name} ({theirs.save}), not of {identity.name}")
    for chunk in chunks:
        if not (chunk.is_object or chunk.fits(values[chunk.id])):
            raise PartError(f"{chunk.words} is not what a part of {identity.save} says")
    return values


def _can_keep(value: Tree) -> bool:
    """Return whether a value is no tensor, or one that is plain memory, which can be copied bit by bit."""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
    return is_plain or not isinstance(value, torch.Tensor)


def _encoded(value: object) -> Tree | None:
    """Return an object as plain values, its tensors copied to the host; None if it is not made of plain values."""
    if type(value) is io.BytesIO:
        return {_STREAM: value.getvalue(), "at": value.tell()}
    try:
        return Content.of({_PLAIN: value}).copy().state()
    except (TypeError, ValueError):  # StateTreeError is one of them
        return None


def _decoded(tree: Mapping[str, Tree]) -> Tree:
    """Return the object that :func:`_encoded` encoded, which shares no memory with it."""
    if _STREAM in tree:
        stream = io.BytesIO(tree[_STREAM])
        stream.seek(tree["at"])
        return stream
    if _PLAIN not in tree:
        raise ValueError("an object was not encoded as it should be")
    return Content.of(tree[_PLAIN]).copy().state()


# --- chunks: the pieces of global tensors and objects that leaves of a sharded state stand for --------------------


#: A leaf of a sharded state (Megatron-core's ``dist_checkpointing/mapping.py``).
Leaf: TypeAlias = ShardedTensor | ShardedObject
#: A sharded state, nested dicts and lists with leaves; or what was loaded, with anything in their places.
State: TypeAlias = Any
#: One of Megatron-core's strategies, by what it can do: not all versions have base classes for them.
Strategy: TypeAlias = Any


class _Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One chunk. Replicas of it, on any ranks, have the same fields.

    It begins at ``global_offset``, by axis; ``flat``: first and last element (exclusive) of the flattened chunk
    that it is restricted to. An object has no local shape and no dtype. Copies on disks have it: the fields stay.
    """

    kind: Literal["tensor", "object"]
    key: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...] = ()
    flat: tuple[int, int] | None = None
    dtype: str = ""

    @classmethod
    def of(cls, leaf: Leaf) -> _Chunk:
        shape, offset = _numbers(leaf.global_shape), _numbers(leaf.global_offset)
        if isinstance(leaf, ShardedObject):
            return cls("object", leaf.key, shape, offset)
        flat = getattr(leaf, "flattened_range", None)  # Megatron-core 0.16 has no such tensors any more
        bounds = None if flat is None else (int(flat.start), int(flat.stop))
        local, dtype = _numbers(leaf.local_shape), dtype_name(leaf.dtype)
        return cls("tensor", leaf.key, shape, offset, local, bounds, dtype)

    @property
    def is_object(self) -> bool:
        return self.kind == "object"

    @property
    def id(self) -> str:
        """The name that ranks send each other: the xxh3-128 of all fields, 32 hexadecimal digits."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(self))

    @property
    def words(self) -> str:
        return f"{self.kind} {self.key} at {list(self.global_offset)}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.local_shape if self.flat is None else (self.flat[1] - self.flat[0],)

    @property
    def nbytes(self) -> int:
        """The size of a tensor's chunk in bytes; 0 for an object, whose size is not known beforehand."""
        return 0 if self.is_object else torch.Size(self.shape).numel() * dtype_of(self.dtype).itemsize

    def fits(self, tensor: torch.Tensor) -> bool:
        return dtype_name(tensor.dtype) == self.dtype and tuple(tensor.shape) == self.shape


def _leaves_of(state: State) -> list[Leaf]:
    leaves: list[Leaf] = []
    _replaced(state, leaves.append)
    return leaves


def _replaced(state: State, replace: Callable[[Leaf], Any]) -> State:
    if isinstance(state, Leaf):
        return replace(state)
    if isinstance(state, Mapping):
        return {key: _replaced(item, replace) for key, item in state.items()}
    return [_replaced(item, replace) for item in state] if isinstance(state, list) else state


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


# --- the identity of a checkpoint ---------------------------------------------------------------------------------
#
# A small file lies next to Megatron's own. It names the save and the directory, and holds size and time of
# Megatron's ``.metadata``. If anybody writes another checkpoint into the directory, or moves it, the file says
# nothing any more, and everything comes from storage.


FILE = "checkpointless.json"
_METADATA = ".metadata"  # what torch writes last of the chunks


class _Identity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A save: its token, the names of the checkpoint's directory and the one around it, how many ranks saved."""

    token: str
    name: str
    world_size: int

    @property
    def save(self) -> SaveId:
        return SaveId.parse(self.token)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """What the file says: the version of its format, the identity, and size and time of ``.metadata``."""

    version: Literal[1]
    identity: _Identity
    metadata: list[int]


def _name_of(checkpoint_dir: str | os.PathLike[str]) -> str:
    return "/".join(Path(os.path.abspath(checkpoint_dir)).parts[-2:])


def _is_local(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Return whether the directory is one of the file system, and no address of a remote store."""
    return "://" not in str(checkpoint_dir)


def _write_identity(identity: _Identity, checkpoint_dir: str | os.PathLike[str]) -> None:
    folder = Path(checkpoint_dir)
    unfinished = folder / f".{FILE}.tmp"
    unfinished.write_bytes(msgspec.json.encode(_File(1, identity, _stamp(folder))))
    os.replace(unfinished, folder / FILE)


def _read_identity(checkpoint_dir: str | os.PathLike[str]) -> _Identity | None:
    """Return the identity of a checkpoint; None if it has none that holds, with a warning if it had one."""
    folder = Path(checkpoint_dir)
    if not _is_local(checkpoint_dir):
        return None
    try:
        about = msgspec.json.decode((folder / FILE).read_bytes(), type=_File)
        if about.metadata != _stamp(folder) or about.identity.name != _name_of(folder):
            raise ValueError("it is of another checkpoint")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        logger.warning("%s is not used, and no copies are: %s", folder / FILE, error)
        return None
    return about.identity


def _stamp(folder: Path) -> list[int]:
    about = (folder / _METADATA).stat()
    return [about.st_size, about.st_mtime_ns]


# --- A load strategy that takes chunks from copies first, and the rest from storage, each once for all ranks ----


class LoadError(CheckpointingException):
    """A checkpoint was not loaded, on no rank; the message says what is missing or damaged, and where."""


class _LoadReport(NamedTuple):
    """Where the chunks of a load came from: bytes of unique tensor chunks by a place of copies, or ``storage``."""

    nbytes: dict[str, int]
    chunks: int
    seconds: float

    def __str__(self) -> str:
        places = ", ".join(f"{nbytes} bytes from {place}" for place, nbytes in self.nbytes.items())
        return f"{self.chunks} chunks in {self.seconds:.2f} s: {places or 'no tensors'}"


class CopiesLoadStrategy:
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
        self.wrapped = torch_strategies.TorchDistLoadShardedStrategy() if wrapped is None else wrapped
        self.copies = process_copies() if copies is None else copies
        self.report: _LoadReport | None = None

    def load(self, sharded_state_dict: State, checkpoint_dir: str | os.PathLike[str]) -> State:
        """Load the sharded part of a checkpoint. Collective.

        Args:
            sharded_state_dict: nested dicts and lists of Megatron-core's ``ShardedTensor`` and ``ShardedObject``.

        Returns:
            The state, with the loaded tensors and objects in the places of the leaves.

        Raises:
            LoadError: on every rank, if anything could not be loaded on any rank.
        """
        began_s = time.monotonic()
        wanted, places = _Wanted(sharded_state_dict), [*self.copies.stores]
        mine, problem = attempt(lambda: _read_identity(checkpoint_dir) if own_rank() == 0 else None)
        if problem is not None:
            logger.warning("copies of %s are not used: %s", checkpoint_dir, problem)
        told = gather({"wanted": wanted.told(), "identity": msgspec.to_builtins(mine), "places": places})
        if any(each["places"] != places for each in told):
            raise LoadError(f"the ranks keep copies in different places: {[each['places'] for each in told]}")
        identity = msgspec.convert(told[0]["identity"], _Identity | None)
        needs = _needs_of([each["wanted"] for each in told])
        found = _Found() if identity is None else _find(self.copies.stores, identity, needs)
        try:
            read, arrived = self._gathered(wanted, needs, found, checkpoint_dir)
            sent = {**found.values, **arrived}
            state = together(f"loading {checkpoint_dir}", lambda: wanted.loaded(read, sent, found.values.keys()))
        except LocalCheckpointError as error:
            raise LoadError(str(error)) from error
        if identity is not None:
            self.copies.found(identity.save)
        nbytes: dict[str, int] = defaultdict(int)
        for id_, need in needs.items():
            nbytes[found.places.get(id_, "storage")] += need.nbytes
        counted = {place: number for place, number in nbytes.items() if number}
        self.report = _LoadReport(counted, len(needs), time.monotonic() - began_s)
        if own_rank() == 0:
            logger.info("loaded %s, %s", checkpoint_dir, self.report)
        return state

    def _gathered(
        self, wanted: _Wanted, needs: Mapping[str, _Need], found: _Found, checkpoint_dir: str | os.PathLike[str]
    ) -> tuple[dict[str, Any], dict[str, Tree]]:
        """Return what this rank has read from storage, and what other ranks have sent to it. Collective."""
        readers = _readers_of({id_: need for id_, need in needs.items() if id_ not in found.sources})
        own = [id_ for id_, reader in readers.items() if reader == own_rank()]
        read = _read(self.wrapped, checkpoint_dir, {id_: wanted.leaves[id_] for id_ in own})
        held = {id_: _encoded(value) if wanted.chunks[id_].is_object else value for id_, value in read.items()}
        told = gather([id_ for id_, value in held.items() if value is None])
        opaque = {id_ for each in told for id_ in each}  # objects that cannot be sent: every rank reads its own
        if opaque:
            again = [id_ for id_ in sorted(opaque - read.keys()) if own_rank() in needs[id_].ranks]
            read |= _read(self.wrapped, checkpoint_dir, {id_: wanted.leaves[id_] for id_ in again})
        sources = {id_: rank for id_, rank in {**found.sources, **readers}.items() if id_ not in opaque}
        sent = _deliveries_of(sources, needs, world_size())
        own_values = {**found.values, **held}
        doing = f"bringing {checkpoint_dir} to all ranks"
        return read, together(doing, lambda: deliver(sent, own_values, wanted.room))

    def __getattr__(self, name: str) -> Any:
        """Let the wrapped strategy answer what is asked besides: metadata, versions, what it can do."""
        if name == "wrapped":
            raise AttributeError(name)
        return getattr(self.wrapped, name)


# --- what copies have ---------------------------------------------------------------------------------------------


@dataclass
class _Found:
    """Chunks: ``sources``, ``places`` are the same on all ranks; ``parts`` hold the memory of ``values``."""

    sources: dict[str, int] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    values: dict[str, Tree] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)


def _find(stores: Mapping[str, PartStore], identity: _Identity, needs: Mapping[str, _Need]) -> _Found:
    """Find chunks in places, the first places first; a damaged copy costs a warning, then another. Collective."""

    def read(copy: StoredPart, is_own: bool) -> tuple[Part, dict[str, Tree]]:
        part = copy.read(is_shared=True)
        values = _values_of(part.content, identity)
        return part, {id_: value for id_, value in values.items() if id_ in needs}

    search = Search(stores, identity.world_size, read)
    places = [*stores]
    choice, mine = search.read(lambda unusable: choose_parts(search.holdings, places, identity.save, unusable))
    told = gather([[number, sorted(mine[copy][1])] for number, copy in enumerate(choice.copies) if copy in mine])
    found = _Found(parts=[part for part, _ in mine.values()])
    for number, chunks in sorted(pair for pairs in told for pair in pairs):
        copy = choice.copies[number]
        for id_ in chunks:
            if id_ not in found.sources:
                found.sources[id_], found.places[id_] = copy.holder, copy.place
                if copy in mine:
                    found.values[id_] = mine[copy][1][id_]
    return found


# --- reading from storage by the wrapped strategy, each chunk on one rank -----------------------------------------


_T = TypeVar("_T")


class _StorageError(RuntimeError):
    """Something of Megatron's failed; the message is one line about it."""


def _read(wrapped: Strategy, checkpoint_dir: str | os.PathLike[str], leaves: Mapping[str, Leaf]) -> dict[str, Any]:
    """Read this rank's share into the leaves' tensors, if all shares are there, as loads wait. Collective."""
    folder, asked = Path(checkpoint_dir), {id_: copy.copy(leaf) for id_, leaf in leaves.items()}
    doing = f"loading {checkpoint_dir}"
    together(doing, lambda: _of_megatron(lambda: _look_up(wrapped, folder, leaves.values())))
    return dict(together(doing, lambda: _of_megatron(lambda: wrapped.load(asked, folder))))


def _look_up(wrapped: Strategy, folder: Path, leaves: Collection[Leaf]) -> None:
    """Raise if a checkpoint lacks what this rank reads."""
    there = wrapped.load_sharded_metadata(folder) if leaves else {}
    for leaf in leaves:
        if (leaf.unique_key if isinstance(leaf, ShardedObject) else leaf.key) not in there:
            raise _StorageError(
                f"{_Chunk.of(leaf).words} is in no copy and not in the checkpoint: check that the model is the one "
                "that was saved, or load with a strictness that leaves out what is missing"
            )


def _of_megatron(do: Callable[[], _T]) -> _T:
    """Return what ``do`` returns; ``_StorageError`` if it raises: torch's collective error is no ``Exception``."""
    try:
        return do()
    except _StorageError:
        raise
    except (Exception, CheckpointException) as error:
        raise _StorageError(_line_of(error)) from error


def _line_of(error: BaseException) -> str:
    """Return one line about an error; of torch's, which holds those of several ranks, the first one."""
    if isinstance(error, CheckpointException):
        if not error.failures:
            return "it failed on another rank"
        rank, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {_line_of(first)}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# --- who reads and sends what: pure functions of plain values, equal on all ranks ---------------------------------


class _Need(NamedTuple):
    """The size of one chunk, and the ranks that need it, which are ascending."""

    nbytes: int
    ranks: list[int]


def _needs_of(everybodys: Sequence[Mapping[str, Parsed]]) -> dict[str, _Need]:
    needs: dict[str, _Need] = {}
    for rank, wishes in enumerate(everybodys):
        for id_, nbytes in wishes.items():
            needs.setdefault(id_, _Need(int(nbytes), [])).ranks.append(rank)
    return dict(sorted(needs.items()))


def _readers_of(needs: Mapping[str, _Need]) -> dict[str, int]:
    """Return, by chunk, who reads it: largest first, of those that need it the rank with the fewest bytes."""
    load: dict[int, int] = defaultdict(int)
    readers = {}
    for id_, need in sorted(needs.items(), key=lambda each: (-each[1].nbytes, each[0])):
        readers[id_] = min(need.ranks, key=lambda rank: (load[rank], rank))
        load[readers[id_]] += max(1, need.nbytes)
    return readers


def _deliveries_of(sources: Mapping[str, int], needs: Mapping[str, _Need], world_size: int) -> list[Delivery]:
    """Return what is sent, in the order of all ranks, so that no ranks wait for each other in a circle.

    Pairs of the same sum of ranks have no rank in common, so that they work at the same time.
    """
    chunks: dict[tuple[int, int], list[str]] = defaultdict(list)
    for id_, source in sources.items():
        for rank in needs[id_].ranks:
            if rank != source:
                chunks[source, rank].append(id_)

    def turn(ends: tuple[int, int]) -> tuple[int, int]:
        return sum(ends) % world_size, ends[0]

    return [Delivery(*ends, chunks[ends]) for ends in sorted(chunks, key=turn)]


# --- what ranks want to load --------------------------------------------------------------------------------------


class _Wanted:
    """What this rank wants: the leaves of a sharded state, by chunk. The tensors in the state are loaded into."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.chunks: dict[str, _Chunk] = {}
        self.leaves: dict[str, Leaf] = {}  # one that stands for each chunk
        self._id_of: dict[int, str] = {}  # by the identity of the leaf
        for leaf in _leaves_of(state):
            chunk = _Chunk.of(leaf)
            self.chunks[chunk.id] = chunk
            self.leaves.setdefault(chunk.id, leaf)
            self._id_of[id(leaf)] = chunk.id

    def told(self) -> dict[str, Json]:
        return {id_: chunk.nbytes for id_, chunk in self.chunks.items()}

    def room(self, id_: str) -> torch.Tensor | None:
        """Return the tensor that a chunk is to be loaded into; None: the sharded state has none."""
        data = self.leaves[id_].data
        return data if isinstance(data, torch.Tensor) else None

    def loaded(self, read: Mapping[str, Any], sent: Mapping[str, Tree], borrowed: Collection[str]) -> State:
        """Return the state with values that were ``read`` or ``sent``; those of ``borrowed`` chunks are copied."""
        given: set[str] = set()

        def value_of(leaf: Leaf) -> Any:
            id_ = self._id_of[id(leaf)]
            value = read[id_] if id_ in read else sent[id_]
            if not isinstance(value, torch.Tensor):
                return value if id_ in read else _decoded(value)
            is_taken = id_ in borrowed or id_ in given
            given.add(id_)
            return _into(leaf.data, value, is_taken)

        return _replaced(self._state, value_of)


def _into(target: Any, value: torch.Tensor, is_taken: bool) -> torch.Tensor:
    """Return ``value`` in ``target``, if there is one, or else itself, or a copy if it belongs to somebody."""
    if not isinstance(target, torch.Tensor):
        return value.clone() if is_taken else value
    if target.data_ptr() == value.data_ptr() and target.device == value.device:
        return value
    place = target.detach()
    place.copy_(value)
    return place


# --- A save strategy that keeps copies of what each rank writes, and lets the writing to storage fail -----------


class DrainError(CheckpointingException):
    """A checkpoint did not get to storage; the message says on which rank, and why."""


class CopiesSaveStrategy(TorchDistSaveShardedStrategy):
    """Saves in Megatron's ``torch_dist`` format, and keeps copies of what this rank writes.

    What this rank writes is copied to host memory first; then training may go on. A thread exchanges the copies
    with the peers and writes them to lasting places, while Megatron writes the checkpoint itself. All ranks save
    together.

    A write to storage that fails costs a warning, and that checkpoint: it is not finished, so that Megatron's and
    NeMo's functions that finish it are not called, and its copies are dropped. The copies of the newest checkpoint
    that is whole are kept.

    Args:
        backend: the name of the format, as Megatron-core knows it.
        version: the version of the format.
        copies: where copies are kept; None: in the memory of this process.
        **kwargs: the other arguments of Megatron-core's ``TorchDistSaveShardedStrategy``.
    """

    def __init__(
        self, backend: str = "torch_dist", version: int = 1, *, copies: Copies | None = None, **kwargs: Any
    ) -> None:
        super().__init__(backend, version, **kwargs)
        self.copies = process_copies() if copies is None else copies
        self._metadata: _Guarded | None = None  # writes the metadata of the newest save

    def async_save(self, sharded_state_dict: State, checkpoint_dir: str | os.PathLike[str]) -> AsyncRequest:
        """Copy the state, keep the copies, and return what is left to do. Collective.

        Args:
            sharded_state_dict: nested dicts and lists of Megatron-core's ``ShardedTensor`` and ``ShardedObject``.

        Returns:
            A request that writes to storage, for an ``AsyncCallsQueue`` of Megatron-core. When it is scheduled, the
            model may be changed.
        """
        return self._request(sharded_state_dict, checkpoint_dir, forgiving=True)

    def save(self, sharded_state_dict: State, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save now. Collective.

        Raises:
            DrainError: on every rank, if the checkpoint did not get to storage.
        """
        self._request(sharded_state_dict, checkpoint_dir, forgiving=False).execute_sync()

    def _request(
        self, sharded_state_dict: State, checkpoint_dir: str | os.PathLike[str], forgiving: bool
    ) -> AsyncRequest:
        identity, exchanges = self._agree(checkpoint_dir)
        leaves = _leaves_of(sharded_state_dict)
        if self.keep_only_main_replica:
            leaves = [leaf for leaf in leaves if is_main_replica(leaf.replica_id)]
        values = _values_to_keep(leaves)
        copied = self.copies.keep(identity.save, _content_of(identity, values), exchanges)
        if copied is not None:
            sharded_state_dict = _with_copies(sharded_state_dict, [leaf for leaf, _ in values], copied)
        request = super().async_save(sharded_state_dict, checkpoint_dir)
        return self._with_end(request, identity, checkpoint_dir, forgiving)

    def _agree(self, checkpoint_dir: str | os.PathLike[str]) -> tuple[_Identity, bool]:
        """Return the identity of a new save and whether ranks exchange copies, the same on all. Collective."""
        told = gather([f"{time.time_ns():016x}{secrets.token_hex(4)}", self.copies.can_exchange])
        unable = [rank for rank, (_, can_exchange) in enumerate(told) if not can_exchange]
        if unable and own_rank() == unable[0]:
            logger.warning("%s is kept without copies at other ranks: an exchange is not over", checkpoint_dir)
        name = _name_of(checkpoint_dir)
        number = re.search(r"(?:step=|iter_)(\d+)", name)  # as NeMo and Megatron-LM name checkpoints
        save = SaveId(int(number[1]) if number else 0, str(told[0][0]))
        return _Identity(str(save), name, world_size()), not unable

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        """Keep the writer whose end is about to be prepared, so that an error on one rank holds up no other one."""
        self._metadata = writer.finish = _Guarded(writer.finish)
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)

    def _with_end(
        self, request: AsyncRequest, identity: _Identity, checkpoint_dir: str | os.PathLike[str], forgiving: bool
    ) -> AsyncRequest:
        theirs, metadata, fns = tuple(request.finalize_fns), self._metadata, list[Callable[[], None]]()

        def finish() -> None:
            _, problem = attempt(lambda: _of_megatron(lambda: [each() for each in theirs]))
            problem = problem or (metadata.problem if metadata is not None else None)
            told = gather(words(problem))
            if any(told):
                line = by_rank(f"{checkpoint_dir} did not get to storage", told)
                self.copies.end(identity.save, is_whole=False)
                if not forgiving:
                    raise DrainError(line) from problem
                del fns[1:]  # what finishes the checkpoint
                logger.warning("%s; training goes on, and the checkpoint before it is still there", line)
                return
            fns.append(partial(self._finish, identity, checkpoint_dir))  # behind what NeMo does to finish it

        fns.append(finish)
        return request._replace(finalize_fns=fns)

    def _finish(self, identity: _Identity, checkpoint_dir: str | os.PathLike[str]) -> None:
        if own_rank() == 0 and _is_local(checkpoint_dir):
            _, problem = attempt(lambda: _write_identity(identity, checkpoint_dir))
            if problem is not None:
                logger.warning("copies of %s will not be used: %s", checkpoint_dir, problem)
        self.copies.end(identity.save, is_whole=True)


def _in_storage_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous host tensor whose storage is no larger: Megatron would copy a view once more."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    flat = tensor.view(-1).view(torch.uint8).numpy()
    return torch.frombuffer(flat.data, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def _with_copies(state: State, leaves: Sequence[Leaf], content: Content) -> State:
    """Return a sharded state with the copies in ``content`` in the place of the tensors of ``leaves``."""
    data = {
        id(leaf): _in_storage_of_its_own(value)
        for leaf, value in zip(leaves, content.state()["values"], strict=True)
        if isinstance(leaf, ShardedTensor)
    }

    def with_copy(leaf: Leaf) -> Leaf:
        mine = copy.copy(leaf)
        mine.data = data.get(id(leaf), leaf.data)
        return mine

    return _replaced(state, with_copy)


@dataclass(eq=False)
class _Guarded:
    """Calls a function on one rank for which others wait, and keeps what it raises."""

    function: Callable[..., None]
    problem: Exception | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        _, self.problem = attempt(lambda: self.function(*args, **kwargs))


# --- Make the strategies the ones that Megatron-core uses for ``torch_dist`` if it is given none ------------------


_BACKEND = ("torch_dist", 1)
_PATCHES = Patches()


def register(copies: Copies | None = None) -> None:
    """Make ``dist_checkpointing.save`` and ``load`` use our strategies when they are given none.

    A later call takes the place of an earlier one.

    Args:
        copies: the copies to keep and to load from; None: those of this process.

    Raises:
        ImportError: this Megatron-core has no default strategies.
    """
    unregister()
    try:
        from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
    except ImportError as error:
        raise ImportError(
            "this Megatron-core has no default strategies: give CopiesSaveStrategy() and CopiesLoadStrategy() to "
            "dist_checkpointing.save and load as sharded_strategy"
        ) from error
    load, save = CopiesLoadStrategy(copies=copies), CopiesSaveStrategy(copies=copies)

    def make(original: Callable[[], None]) -> Callable[[], None]:
        def register_ours() -> None:
            original()
            register_default_strategy(StrategyAction.LOAD_SHARDED, *_BACKEND, load)
            register_default_strategy(StrategyAction.SAVE_SHARDED, *_BACKEND, save)

        return register_ours

    why = "Megatron-core registers its own strategies again before each look-up"
    _PATCHES.make([Patch(torch_strategies, "register_default_torch_strategies", make, why)])


def unregister() -> None:
    """Make Megatron-core use its own strategies again."""
    _PATCHES.undo()


def are_defaults() -> bool:
    """Return whether our strategies are the ones that Megatron-core uses if it is given none."""
    return _PATCHES.are_made
