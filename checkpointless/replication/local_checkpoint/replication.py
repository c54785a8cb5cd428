"""Copies of a rank's checkpoint on other nodes: how they get there, and how a lost part is retrieved.

Parts are exchanged as those of tiers are (:mod:`checkpointless.replication.exchange`); a lost one travels as in a
recovery from memory (:mod:`checkpointless.transfer.transfer`).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from checkpointless.inprocess.communicators.helper_thread import run_in_helper_thread
from checkpointless.replication.agreement import NoReplicasAvailableError, attempt, present
from checkpointless.replication.exchange import CliqueExchange, agreed_jump, clique_group
from checkpointless.replication.host_memory import HostMemoryPool
from checkpointless.replication.local_checkpoint.tensor_aware import content_of, state_of
from checkpointless.replication.parts import Content, Part, PartId, SaveId
from checkpointless.replication.retrieval import all_of, receive_part, send_part
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.state_tree import Tree
from checkpointless.transfer.exchange import all_gather_json
from checkpointless.transfer.transfer import Fill

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
class _PartTransfer:
    """One part that is sent to one rank.

    Attributes:
        holders: the global ranks that send the part, each of them a share.
    """

    id: str
    receiver: int
    holders: tuple[int, ...]


@dataclass(frozen=True)
class _ExchangePlan:
    """The transfers of a clique, one after the other; the plan is the same on all members."""

    transfers: tuple[_PartTransfer, ...] = ()


def _plan_retrieval(
    members: Sequence[int],
    available: Mapping[int, Collection[str]],
    wanted: Mapping[int, Collection[str]],
) -> _ExchangePlan:
    """Plan that every wanted part is sent by all members that have it.

    Args:
        available: the parts that each rank has; ranks that are not members are ignored.
        wanted: the parts that each member asks for.

    Raises:
        NoReplicasAvailableError: no other member has a wanted part.
    """
    transfers = []
    for receiver in sorted(members):
        for part in sorted(set(wanted.get(receiver, ()))):
            holders = tuple(
                rank for rank in sorted(members) if rank != receiver and part in available.get(rank, ())
            )
            if not holders:
                raise NoReplicasAvailableError(
                    f"rank {receiver} has no copy of {part}, and none of the ranks {sorted(members)} has one"
                )
            transfers.append(_PartTransfer(part, receiver, holders))
    return _ExchangePlan(tuple(transfers))


@dataclass(frozen=True)
class GroupWrapper:
    """A process group and its members.

    Attributes:
        group: the process group; None: that of all ranks.
    """

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
            The strategy of the clique that this rank belongs to (see :func:`clique_of`).

        Raises:
            ValueError: the world size is not a multiple of J * F; or the ranks ask for different cliques; or J is
                to be the size of the node and that is not known.
        """
        jump = agreed_jump(replication_jump, replication_factor)
        return cls(clique_group(jump, replication_factor))

    @property
    def peers(self) -> tuple[int, ...]:
        """The global ranks of the clique, in ascending order."""
        return self._exchange.members

    def replicate(self, local_ckpt: Tree, id_: str) -> tuple[list[Tree], list[str]]:
        """Give this rank's checkpoint to all members and receive theirs. Collective in the clique.

        Returns:
            The checkpoints of the members in the order of their ranks, this rank's own as it was given, and their
            names. One that arrived damaged again and again, or for which there is no memory, is left out.

        Raises:
            StateTreeError: this rank's state cannot travel.
            RuntimeError: another member's state cannot travel, or a member is gone.
        """
        content, problem = attempt(lambda: content_of(local_ckpt))
        problems = all_gather_json(str(problem or ""), self.local_group.group)
        if problem is not None:
            raise problem
        for member, theirs in zip(self.peers, problems):
            if theirs:
                raise RuntimeError(f"rank {member} has nothing to replicate: {theirs}")
        rank, mine = dist.get_rank(), present(content)
        named = Content(state_tree.dumps([id_, mine.structure]), mine.tensors)
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
    ) -> _ExchangePlan:
        """Plan how the members get the checkpoints that they miss, on all alike. Collective in the clique.

        Raises:
            NoReplicasAvailableError: on every member, if no rank in the clique has what one of them wants.
        """
        everybodys = all_gather_json(list(wanted), self.local_group.group)
        return _plan_retrieval(self.peers, globally_available_ids, dict(zip(self.peers, everybodys)))

    def retrieve_execute(self, plan: _ExchangePlan, held: Mapping[str, Tree]) -> dict[str, Tree]:
        """Carry a plan out. Collective in the clique.

        Raises:
            TransferError: a checkpoint arrived damaged and could not be mended.
        """
        rank = dist.get_rank()
        sent = {
            transfer.id: content_of(held[transfer.id]) for transfer in plan.transfers if rank in transfer.holders
        }
        arrived: dict[str, Tree] = {}

        def carry_out(transfer: _PartTransfer) -> None:
            if rank in transfer.holders:
                place = transfer.holders.index(rank)
                send_part(sent[transfer.id], transfer.id, [Fill(transfer.receiver, place, len(transfer.holders))])
            elif rank == transfer.receiver:
                content, _ = receive_part(transfer.holders, self.target_device)
                arrived[transfer.id] = state_of(content)

        all_of(carry_out, plan.transfers)
        return arrived


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
        """Exchange checkpoints as the strategy does."""
        return self.replication_strategy.replicate(local_ckpt, id_)

    def retrieve_plan(self, globally_available_ids: Mapping[int, Sequence[str]], wanted: Sequence[str]) -> Plan:
        """Plan a retrieval as the strategy does."""
        return self.replication_strategy.retrieve_plan(globally_available_ids, wanted)

    def retrieve_execute(self, *args: Any, **kwargs: Any) -> dict[str, Tree]:
        """Carry a plan out as the strategy does."""
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
