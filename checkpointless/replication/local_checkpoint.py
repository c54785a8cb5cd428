"""Checkpoints in a directory of each node: the level below recovery from memory and above shared storage.

Every rank writes its part into its node's directory, and those of its clique, if any, write it into theirs. All
ranks decide alike, since they decide by what they have sent each other.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from checkpointless.inprocess.communicators.helper_thread import run_in_helper_thread
from checkpointless.replication.agreement import (
    LocalCheckpointError,
    NoReplicasAvailableError,
    attempt,
    by_rank,
    gather,
    own_rank,
    together,
    world_size,
)
from checkpointless.replication.exchange import CliqueExchange, clique_group
from checkpointless.replication.host_memory import HostMemoryPool
from checkpointless.replication.parts import Content, Part, PartId, SaveId
from checkpointless.replication.retrieval import Choice, Copy, Delivery, Search, bring, choose, deliver
from checkpointless.replication.store import PartStore, open_store, write_parts
from checkpointless.replication.tensor_aware import (
    BasicTensorAwareStateDict,
    TensorAwareStateDict,
    content_of,
    register_form,
    state_of,
)
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.state_tree import Tree
from checkpointless.transfer.exchange import all_gather_json
from checkpointless.transfer.transfer import TransferError

logger = logging.getLogger(__name__)

__all__ = [
    "AsyncRequest",
    "BasicTensorAwareStateDict",
    "CliqueReplicationStrategy",
    "GroupWrapper",
    "LazyCliqueReplicationStrategy",
    "LazyReplicationStrategyBuilder",
    "LocalCheckpointError",
    "LocalCheckpointManager",
    "NoReplicasAvailableError",
    "ReplicationStrategy",
    "TensorAwareStateDict",
    "register_form",
]


# --- A save that is made while training goes on: a request that a framework's queue carries out ------------------


class AsyncRequest(NamedTuple):
    """What is still to be done for a save.

    It has the fields and methods of the requests of Megatron-core
    (``megatron.core.dist_checkpointing.strategies.async_utils``) and of nvidia-resiliency-ext
    (``checkpointing.async_ckpt.core``), so that the ``AsyncCallsQueue`` of either one can schedule it, also with a
    persistent worker. Without such a queue, call :meth:`write` in a thread, and :meth:`execute_finalize_fns` on all
    ranks when it has ended.

    Attributes:
        async_fn: writes this rank's files; it may be called in another process. None: there is nothing to write.
        async_fn_args: its arguments.
        finalize_fns: called one after the other, on all ranks together, when the files of all ranks are written.
        async_fn_kwargs: its keyword arguments.
        preload_fn: always None: the state was copied to host memory when the save was asked for.
        is_frozen: whether no function may be added any more.
        call_idx: the number that a queue gives it.
    """

    async_fn: Callable[..., None] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], None]]
    async_fn_kwargs: Mapping[str, Any] = {}
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], None]) -> None:
        """Have ``fn`` called after the other functions that end the save; ``RuntimeError`` if the request is
        frozen.
        """
        if self.is_frozen:
            raise RuntimeError("the request is scheduled: nothing can be added to its end any more")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """Return the request as one to which nothing can be added."""
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Carry the request out now. Collective."""
        self.write()
        if dist.is_initialized():
            dist.barrier()
        self.execute_finalize_fns()

    def write(self) -> None:
        """Write this rank's files."""
        if self.async_fn is not None:
            self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = False) -> int:
        """End the save, whose files are written on all ranks, and return the number of the request. Collective.

        ``validate_matching_call_idx`` is not needed: the ranks compare the saves that they end.
        """
        for each in self.finalize_fns:
            each()
        return self.call_idx


# --- the manager --------------------------------------------------------------------------------------------------


class LocalCheckpointManager:
    """Saves and loads checkpoints in a directory of each node. All ranks of the job call each method together.

    Its names and its use are those of nvidia-resiliency-ext's class of this name, so NeMo's
    ``MCoreHierarchicalCheckpointIO`` takes it.

    The manager keeps the newest save that is complete on all ranks, and the saves that are being made. For each
    rank of its node, the directory therefore takes at least twice the rank's part times the replication factor. An
    older save is deleted when the next but one begins; as long as none is complete, nothing is deleted. A save that
    all ranks have completed supersedes any save of a later iteration that was begun before, because training went
    back from there.

    Only this user can access the files. They are written under another name and renamed when they are on the disk,
    and contain nothing that is evaluated when they are loaded. A state is nested dicts, lists and tuples of plain
    values (see :mod:`checkpointless.state.serialization.state_tree`) and strided tensors of any dtype, on the CPU
    or on a GPU; or a tensor-aware state of such values
    (:mod:`checkpointless.replication.tensor_aware`).

    A disk that is full or fails costs the copies that could not be written, with a warning. If no copy of a part is
    left, it costs the save; what was complete before is still there.

    Every wait for other ranks ends with the timeout of the process group. Without process groups, the job is this
    process alone.

    Args:
        root_local_ckpt_dir: a directory on a disk of the node, or a place named by
            :func:`~checkpointless.replication.register_store`; the same for all ranks of the node.
        session_id: name of a folder that separates jobs in the same directory.
        repl_strategy: which ranks keep copies of which parts; None: no copies. A load needs the world size of its
            save.

    Raises:
        OSError: the directory cannot be made, or other users could write to it.
        ValueError: ``session_id`` is no name for a folder.
    """

    def __init__(
        self,
        root_local_ckpt_dir: str | os.PathLike[str],
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
    ) -> None:
        if session_id in (".", "..") or any(each in session_id for each in "/\0"):
            raise ValueError(f"session_id has to be a name for a folder, not {session_id!r}")
        self.root_local_ckpt_dir = Path(root_local_ckpt_dir)
        self.session_id = session_id
        self.repl_strategy = repl_strategy
        self._store = open_store(root_local_ckpt_dir, *([session_id] if session_id else []))
        self._latest: SaveId | None = None  # the newest that is complete on all ranks
        self._searched = False  # whether _latest is up to date
        self._writing: list[SaveId] = []  # saves that have not ended, in the order in which they were begun

    @property
    def local_ckpt_dir(self) -> Path:
        """The directory of this job, which the ranks of the node share."""
        return self.root_local_ckpt_dir / self.session_id

    def save(self, state_dict: Tree, iteration: int, is_async: bool = False) -> AsyncRequest | None:
        """Save this rank's state, and the copies that it keeps for its peers.

        Copies are exchanged before this method returns. They need host memory: as much as the peers' parts take,
        and with ``is_async`` also as much as this rank's part takes, until the files are written.

        Args:
            state_dict: a tensor-aware state, a nested one, or an object that has one as its ``state_dict``. It is
                not changed.
            iteration: the iteration, at least 0 and the same on all ranks.
            is_async: only copy the state, so that training can go on, and return what is still to be done.

        Returns:
            With ``is_async``, a request for the ``AsyncCallsQueue`` of Megatron-core or nvidia-resiliency-ext. The
            save is complete when it has been carried out and ended on all ranks. Otherwise None; the save is then
            complete, or a warning says why it is not.

        Raises:
            LocalCheckpointError: on every rank, if the state of any rank cannot be stored, or if the ranks call
                different things.
        """
        call = "asynchronous save" if is_async else "save"
        token, writing = self._open(call, iteration)
        own, state = together(call, lambda: self._prepare(state_dict, iteration, is_async))
        if not self._searched:
            self._find(lambda each: True)
        save = SaveId(iteration, token)
        if self._latest is not None:
            self._delete_all_but({self._latest, save} | writing)
        part = PartId(save, own_rank())
        kept = together(f"replicating iteration {iteration}", lambda: self._replicate(own, state, part))
        self._writing.append(save)
        arguments = self._store, kept, own_rank(), world_size()
        request = AsyncRequest(_write, arguments, [lambda: self._finish(save)])
        if is_async:
            return request
        # Not in a thread: one that outlives an interruption would write tensors that are being trained by then.
        request.write()
        request.execute_finalize_fns()
        return None

    def find_latest(self) -> int:
        """Find the newest iteration of which every part is undamaged on its rank or on one of its peers.

        The method reads this rank's part to its end, to be sure. The next :meth:`load` loads that iteration.

        Returns:
            The iteration, or -1 if there is none.
        """
        self._open("find_latest")
        self._find(lambda save: True)
        return -1 if self._latest is None else self._latest.iteration

    def load(self) -> tuple[Tree, str]:
        """Load this rank's part of the iteration that :meth:`find_latest` found, or would find.

        A part that is missing or damaged on this node comes from a peer, and is written to this node's directory.

        Returns:
            The state, of the class that was saved, and the name of the part. The tensors of a tensor-aware state
            are on the devices that they came from, those of a nested state on the CPU.

        Raises:
            NoReplicasAvailableError: on every rank, if a part cannot be obtained; the message names the part and
                the iteration.
            LocalCheckpointError: on every rank, if there is no local checkpoint at all, or if loading failed on any
                rank.
        """
        self._open("load")
        known = self._latest if self._searched else None
        choice, read = self._find(lambda save: known in (None, save))
        if choice.save is None:
            self._searched = False  # an older save may still be whole
            lacking = choice.lacking or ({} if known is None else {known: range(world_size())})
            for save, lost in lacking.items():
                raise NoReplicasAvailableError(_without_copy(save, lost))
            raise LocalCheckpointError(f"no rank has a local checkpoint; this one looked in {self.local_ckpt_dir}")
        part = PartId(choice.save, own_rank())
        content, _ = together(f"fetching iteration {part.save.iteration}", lambda: bring(choice, read))
        assert content is not None, "every rank has a part of each save"
        if choice.copies[own_rank()].holder != own_rank():
            # So it is in two places again. The load succeeds without that.
            write_parts(self._store, [Part.sealed(part, world_size(), content)], own_rank())
        return together(f"putting iteration {part.save.iteration} together", lambda: _in_place(content)), str(part)

    # --- agreement ------------------------------------------------------------------------------------------------

    def _open(self, call: str, iteration: int | None = None) -> tuple[str, set[SaveId]]:
        """Begin a call, the same on all ranks; return a token for a save, and what any rank takes for being made.

        A rank whose process is new may know less than the others; then no rank relies on what it knew.
        """
        told = gather(
            {
                "call": [call, iteration],
                "latest": [self._searched, str(self._latest)],
                "writing": sorted(map(str, self._writing)),
                "token": f"{time.time_ns():016x}{secrets.token_hex(4)}",
            }
        )
        if any(each["latest"] != told[0]["latest"] for each in told):
            self._searched = False
        if any(each["call"] != told[0]["call"] for each in told):
            calls = [" ".join(str(word) for word in each["call"] if word is not None) for each in told]
            raise LocalCheckpointError(by_rank("the ranks call different things", calls))
        return str(told[0]["token"]), {SaveId.parse(name) for each in told for name in each["writing"]}

    def _finish(self, save: SaveId) -> None:
        """End a save whose files are written where they could be: keep it if no part is missing. Collective."""
        shelf, problem = attempt(lambda: self._store.shelf(world_size()))
        if problem is not None:
            logger.warning("rank %d cannot look at its local checkpoints: %s", own_rank(), problem)
        told = gather({"save": str(save), "parts": sorted((shelf or {}).get(save, {}))})
        if any(each["save"] != told[0]["save"] for each in told):
            raise LocalCheckpointError(by_rank("the ranks end different saves", [each["save"] for each in told]))
        if save not in self._writing:
            return  # it has ended before, or one that was begun later has
        later = self._writing[self._writing.index(save) + 1 :]
        lost = sorted({*range(world_size())}.difference(*(each["parts"] for each in told)))
        if lost:
            logger.warning("iteration %d is not kept: %s", save.iteration, _without_copy(save, lost))
            self._store.delete(lambda each: each == save)
            self._writing.remove(save)
            return
        before, self._latest, self._searched, self._writing = self._latest, save, True, later
        older = before if before is not None and before < save else None
        self._delete_all_but({older, save, *self._writing})  # a search would find those of later iterations

    # --- saving ---------------------------------------------------------------------------------------------------

    def _prepare(self, state: Tree, iteration: int, is_async: bool) -> tuple[Content, Tree]:
        """Check and copy what must be before others are needed; return the content, and its state for peers."""
        if type(iteration) is not int or iteration < 0:
            raise ValueError(f"an iteration must be a whole number of at least 0, not {iteration!r}")
        content = content_of(state)
        content = content.copy() if is_async else content
        return content, None if self.repl_strategy is None else state_of(content)

    def _replicate(self, content: Content, state: Tree, part: PartId) -> list[tuple[PartId, Content]]:
        if self.repl_strategy is None:
            return [(part, content)]
        try:
            states, names = self.repl_strategy.replicate(state, str(part))
        except TransferError as error:
            logger.warning("%s is kept without what the peers sent: %s", part.words, error)
            return [(part, content)]
        return [(PartId.parse(name), content_of(state)) for state, name in zip(states, names)]

    # --- finding --------------------------------------------------------------------------------------------------

    def _find(self, is_of_use: Callable[[SaveId], bool]) -> tuple[Choice, dict[Copy, Part]]:
        """Find the newest save of which all parts are undamaged, and read this rank's share of them. Collective."""
        search = Search({"disk": self._store}, world_size(), lambda copy, is_own: copy.read(is_shared=not is_own))
        choice, read = search.read(lambda unusable: choose(search.holdings, ["disk"], is_of_use, unusable))
        for save, lost in choice.lacking.items():
            logger.warning("%s", _without_copy(save, lost))
        self._latest, self._searched = choice.save, True
        return choice, read

    def _delete_all_but(self, keep: Collection[SaveId | None]) -> None:
        self._store.delete(lambda save: save not in keep)


def _write(store: PartStore, contents: Sequence[tuple[PartId, Content]], holder: int, world_size: int) -> None:
    write_parts(store, [Part.sealed(part, world_size, content) for part, content in contents], holder)


def _in_place(content: Content) -> Tree:
    """Return the state of a content, a tensor-aware one with its tensors on the devices that they came from."""
    state = state_of(content)
    if hasattr(state, "restore_tensor_device"):
        state.restore_tensor_device(non_blocking=False)
    return state


def _without_copy(save: SaveId, lost: Sequence[int]) -> str:
    parts = ", ".join(PartId(save, rank).words for rank in lost)
    return f"no undamaged copy is left of {parts} on any rank"


# --- Copies of a rank's checkpoint on other nodes ----------------------------------------------------------------

_Eager = TypeVar("_Eager", bound="ReplicationStrategy")

#: How wanted checkpoints come to this rank: each strategy makes plans of its own kind, and alone reads them.
Plan: TypeAlias = Any
_UNNAMED = SaveId(0, "0" * 24)  # the name of a checkpoint is in its structure


class ReplicationStrategy(ABC):
    """Decides where copies of local checkpoints are kept. All ranks call each method together."""

    @abstractmethod
    def replicate(self, local_ckpt: Tree, id_: str) -> tuple[list[Tree], list[str]]:
        """Exchange checkpoints with the peers.

        Args:
            local_ckpt: the state that this rank saves: nested dicts, lists and tuples of plain values and tensors.
            id_: the checkpoint's name.

        Returns:
            The checkpoints that this rank has to keep, its own included, and their names.
        """

    @abstractmethod
    def retrieve_plan(self, globally_available_ids: Mapping[int, Sequence[str]], wanted: Sequence[str]) -> Plan:
        """Plan how wanted checkpoints come from the ranks that have them.

        Args:
            globally_available_ids: the names of the checkpoints that each global rank has.
            wanted: the names of the checkpoints that this rank asks for.

        Raises:
            NoReplicasAvailableError: no rank has a wanted checkpoint.
        """

    @abstractmethod
    def retrieve_execute(self, plan: Plan, held: Mapping[str, Tree]) -> dict[str, Tree]:
        """Carry a plan out.

        Args:
            plan: the plan that :meth:`retrieve_plan` returned.
            held: the checkpoints that this rank has, by name; at least those that it is to send.

        Returns:
            The checkpoints that this rank asked for, by name.
        """


@dataclass(frozen=True)
class GroupWrapper:
    """A process group (None: that of all ranks) and its members."""

    group: dist.ProcessGroup | None = None

    @classmethod
    def wrap(cls, group: GroupWrapper | dist.ProcessGroup | None) -> GroupWrapper:
        """Return a process group as a wrapper; a wrapper is returned as it is."""
        return group if isinstance(group, GroupWrapper) else cls(group)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the members, in the order of the group."""
        return tuple(dist.get_process_group_ranks(self.group))

    @property
    def world_size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    @property
    def my_group_rank(self) -> int:
        """This rank's place among the members."""
        return self.ranks.index(dist.get_rank())


class CliqueReplicationStrategy(ReplicationStrategy):
    """Keeps, on every member of a process group, a copy of what each of the others saves.

    All members send at the same time through that group, whose timeout limits every wait.

    Args:
        local_group: the process group of the clique; its members should be in different failure domains.
        target_device: the device on which the tensors of received checkpoints are put.
    """

    def __init__(
        self, local_group: GroupWrapper | dist.ProcessGroup, target_device: torch.device | str = "cpu"
    ) -> None:
        self.local_group = GroupWrapper.wrap(local_group)
        self.target_device = torch.device(target_device)
        self._exchange = CliqueExchange(self.local_group.group)

    @classmethod
    def from_replication_params(
        cls, replication_jump: int = 0, replication_factor: int = 2
    ) -> CliqueReplicationStrategy:
        """Make the process groups of all cliques. Collective: every rank of the job calls it.

        Args:
            replication_jump: J, the distance between the ranks of a clique: the size of a failure domain. 0, which
                cannot be a distance, stands for the number of ranks on this node (``LOCAL_WORLD_SIZE``), so that
                copies are on the next nodes.
            replication_factor: F, how many ranks keep each part, its owner included.

        Returns:
            The strategy of the clique that this rank belongs to.

        Raises:
            ValueError: the world size is not a multiple of J * F; or the ranks ask for different cliques; or J is
                to be the size of the node and that is not known.
        """
        return cls(clique_group(replication_jump, replication_factor))

    @property
    def peers(self) -> tuple[int, ...]:
        """The global ranks of the clique, in ascending order."""
        return self._exchange.members

    def replicate(self, local_ckpt: Tree, id_: str) -> tuple[list[Tree], list[str]]:
        """Give this rank's checkpoint to all members and receive theirs. Collective in the clique.

        Returns:
            The checkpoints of the members in the order of their ranks, this rank's own as it was given, and their
            names. One that arrived damaged, or for which there is no memory, is left out.

        Raises:
            StateTreeError: this rank's state cannot travel.
            RuntimeError: another member's state cannot travel, or a member is gone.
        """
        content, problem = attempt(lambda: content_of(local_ckpt))
        problems = all_gather_json(str(problem or ""), self.local_group.group)
        if problem is not None or content is None:
            raise problem or AssertionError
        for member, theirs in zip(self.peers, problems):
            if theirs:
                raise RuntimeError(f"rank {member} has nothing to replicate: {theirs}")
        rank = dist.get_rank()
        named = Content(state_tree.dumps([id_, content.structure]), content.tensors)
        part = Part.sealed(PartId(_UNNAMED, rank), len(self.peers), named)
        arrived = run_in_helper_thread(lambda: list(self._exchange.exchange(part, HostMemoryPool())))
        found: dict[int, tuple[Tree, str]] = {rank: (local_ckpt, id_)}
        for sender, theirs in arrived:
            name, structure = state_tree.loads(theirs.content.structure)
            tensors = tuple(tensor.to(self.target_device) for tensor in theirs.content.tensors)
            found[sender] = state_of(Content(structure, tensors)), name
        members = sorted(found)
        return [found[member][0] for member in members], [found[member][1] for member in members]

    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Sequence[str]], wanted: Sequence[str]
    ) -> tuple[Delivery, ...]:
        """Plan how the members get what they miss, on all alike; ``NoReplicasAvailableError`` if no other one has
        it. Collective in the clique.
        """
        everybodys = all_gather_json(list(wanted), self.local_group.group)
        plan = []
        for receiver, ids in zip(self.peers, everybodys, strict=True):
            for id_ in sorted({*ids}):
                others = (peer for peer in self.peers if peer != receiver)
                holder = next((each for each in others if id_ in globally_available_ids.get(each, ())), None)
                if holder is None:
                    raise NoReplicasAvailableError(
                        f"rank {receiver} has no copy of {id_}, and none of the ranks {[*self.peers]} has one"
                    )
                plan.append(Delivery(holder, receiver, (id_,)))
        return tuple(plan)

    def retrieve_execute(self, plan: Sequence[Delivery], held: Mapping[str, Tree]) -> dict[str, Tree]:
        """Carry a plan out; ``TransferError`` if a part did not arrive whole. Collective in the clique."""
        due = {id_ for each in plan if each.source == dist.get_rank() for id_ in each.names}
        arrived = deliver(plan, {id_: content_of(held[id_]) for id_ in due}, device=self.target_device)
        return {id_: state_of(content) for id_, content in arrived.items()}


class LazyReplicationStrategyBuilder(ReplicationStrategy, Generic[_Eager]):
    """A replication strategy that is made when it is first used, because process groups do not exist before.

    If the job's process groups are rebuilt after a fault, so is the strategy. The first use is collective: every
    rank of the job takes part. A subclass says what is made, in ``_eager_build``.
    """

    def __init__(self) -> None:
        self._built: _Eager | None = None
        self._built_in: Callable[[], object] = lambda: None

    @abstractmethod
    def _eager_build(self) -> _Eager:
        """Make the strategy. Collective."""

    @property
    def replication_strategy(self) -> _Eager:
        """The strategy, made if the process groups that it belongs to are new."""
        world = dist.group.WORLD
        if self._built is None or self._built_in() is not world:
            self._built = self._eager_build()
            self._built_in = weakref.ref(world)  # a strong one would keep an old generation's communicators
        return self._built

    def replicate(self, local_ckpt: Tree, id_: str) -> tuple[list[Tree], list[str]]:
        return self.replication_strategy.replicate(local_ckpt, id_)

    def retrieve_plan(self, globally_available_ids: Mapping[int, Sequence[str]], wanted: Sequence[str]) -> Plan:
        return self.replication_strategy.retrieve_plan(globally_available_ids, wanted)

    def retrieve_execute(self, *args: Any, **kwargs: Any) -> dict[str, Tree]:
        return self.replication_strategy.retrieve_execute(*args, **kwargs)


class LazyCliqueReplicationStrategy(LazyReplicationStrategyBuilder[CliqueReplicationStrategy]):
    """A :class:`CliqueReplicationStrategy` whose process groups are made when it is first used.

    Args:
        replication_jump: the distance between the ranks of a clique; see
            :meth:`CliqueReplicationStrategy.from_replication_params`.
        replication_factor: how many ranks keep each part, its owner included.

    Raises:
        ValueError: a parameter is out of range.
    """

    def __init__(self, replication_jump: int = 0, replication_factor: int = 2) -> None:
        super().__init__()
        if replication_jump < 0 or replication_factor < 1:
            raise ValueError(
                f"replication_jump must be 0 or more and replication_factor 1 or more, "
                f"not {replication_jump} and {replication_factor}"
            )
        self.replication_jump = replication_jump
        self.replication_factor = replication_factor

    def _eager_build(self) -> CliqueReplicationStrategy:
        return CliqueReplicationStrategy.from_replication_params(self.replication_jump, self.replication_factor)
