"""Copies of a rank's checkpoint on other nodes: how they get there, and how a lost part is retrieved.

Cliques and retrieval plans are pure functions (:mod:`checkpointless.local_checkpoint.cliques`); the bytes travel as
in a recovery from memory (:mod:`checkpointless.transfer.transfer`).
"""

from __future__ import annotations

import logging
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from checkpointless.environment import LOCAL_WORLD_SIZE_ENV
from checkpointless.inprocess.context import aside
from checkpointless.local_checkpoint.cliques import ExchangePlan, PartTransfer, all_cliques, plan_retrieval
from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.part_transfer import receive_part, send_part
from checkpointless.serialization.state_tree import Tree
from checkpointless.transfer.bucket_rounds import TransferError
from checkpointless.transfer.exchange import MAX_BYTES, all_gather_json
from checkpointless.transfer.transfer import Fill
from checkpointless.transfer.wire import wire_device

logger = logging.getLogger(__name__)

_Round = TypeVar("_Round")
_Eager = TypeVar("_Eager", bound="ReplicationStrategy")

#: How wanted checkpoints come to this rank: each strategy makes plans of its own kind, and alone reads them.
Plan: TypeAlias = Any


class ReplicationStrategy(ABC):
    """Decides where copies of local checkpoints are kept. All ranks call each method together."""

    @property
    def peers(self) -> tuple[int, ...]:
        """The global ranks that this rank exchanges parts with, this rank included. Default: this rank alone."""
        return (dist.get_rank(),)

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

    Parts are sent between two ranks at a time, one member's after the other's, through the default process group,
    whose timeout limits every wait. All cliques of a job work at the same time.

    Args:
        local_group: the process group of the clique; its members should be in different failure domains.
        target_device: the device on which the tensors of received checkpoints are put.
    """

    def __init__(
        self, local_group: GroupWrapper | dist.ProcessGroup, target_device: torch.device | str = "cpu"
    ) -> None:
        self.local_group = GroupWrapper.wrap(local_group)
        self.target_device = torch.device(target_device)
        self._members = self.local_group.ranks

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
        return cls(clique_group(jump, replication_factor, timeout_of_the_job()))

    @property
    def peers(self) -> tuple[int, ...]:
        """The global ranks of the clique, in ascending order."""
        return self._members

    def replicate(self, local_ckpt: Tree, id_: str) -> tuple[list[Tree], list[str]]:
        """Give this rank's checkpoint to all members and receive theirs. Collective in the clique.

        Args:
            local_ckpt: the state that this rank saves: nested dicts, lists and tuples of plain values and tensors.
            id_: the checkpoint's name.

        Returns:
            The checkpoints of all members in the order of their ranks, this rank's own as it was given, and their
            names.

        Raises:
            StateTreeError: this rank's state cannot travel.
            RuntimeError: another member's state cannot travel.
            TransferError: a checkpoint arrived damaged and could not be mended.
        """
        content = self._agree_tosend_part(local_ckpt)
        rank = dist.get_rank()
        found: dict[int, tuple[Tree, str]] = {rank: (local_ckpt, id_)}

        def exchange_with(sender: int) -> None:
            if rank == sender:
                send_part(content, id_, [Fill(other, 0, 1) for other in self._members if other != rank])
            else:
                found[sender] = self._receive([sender])

        aside(lambda: _all_of(exchange_with, self._members))
        return [found[member][0] for member in self._members], [found[member][1] for member in self._members]

    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Sequence[str]], wanted: Sequence[str]
    ) -> ExchangePlan:
        """Plan how the members get the checkpoints that they miss. Collective in the clique.

        Args:
            globally_available_ids: the names of the checkpoints that each global rank has.
            wanted: the names of the checkpoints that this rank asks for.

        Returns:
            The plan, the same on every member.

        Raises:
            NoReplicasAvailableError: on every member, if no rank in the clique has what one of them wants.
        """
        everybodys = all_gather_json(list(wanted), self.local_group.group)
        return plan_retrieval(self._members, globally_available_ids, dict(zip(self._members, everybodys)))

    def retrieve_execute(self, plan: ExchangePlan, held: Mapping[str, Tree]) -> dict[str, Tree]:
        """Carry a plan out. Collective in the clique.

        Args:
            plan: the plan that :meth:`retrieve_plan` returned.
            held: the checkpoints that this rank has, by name; at least those that it is to send.

        Returns:
            The checkpoints that this rank asked for, by name.

        Raises:
            TransferError: a checkpoint arrived damaged and could not be mended.
        """
        rank = dist.get_rank()
        sent = {
            transfer.id: Content.of(held[transfer.id]) for transfer in plan.transfers if rank in transfer.holders
        }
        arrived: dict[str, Tree] = {}

        def carry_out(transfer: PartTransfer) -> None:
            if rank in transfer.holders:
                place = transfer.holders.index(rank)
                send_part(sent[transfer.id], transfer.id, [Fill(transfer.receiver, place, len(transfer.holders))])
            elif rank == transfer.receiver:
                arrived[transfer.id], _ = self._receive(transfer.holders)

        aside(lambda: _all_of(carry_out, plan.transfers))
        return arrived

    def _agree_tosend_part(self, state: Tree) -> Content:
        """Return this rank's checkpoint if every member's can travel, so that no rank waits for one that cannot."""
        content, problem = None, None
        try:
            content = Content.of(state)
            if len(content.structure) > MAX_BYTES // 2:
                raise ValueError(f"there are {len(content.structure)} bytes of state that is no tensor: too many")
        except (TypeError, ValueError) as error:
            problem = error
        problems = all_gather_json(str(problem or ""), self.local_group.group)
        if problem is not None:
            raise problem
        for member, theirs in zip(self._members, problems):
            if theirs:
                raise RuntimeError(f"rank {member} has nothing to replicate: {theirs}")
        assert content is not None
        return content

    def _receive(self, holders: Sequence[int]) -> tuple[Tree, str]:
        """Receive a checkpoint, of which each holder sends a share, and its name."""
        content, id_ = receive_part(holders, self.target_device)
        return content.state(), id_


class LazyReplicationStrategyBuilder(ReplicationStrategy, Generic[_Eager]):
    """A replication strategy that is made when it is first used, because process groups do not exist before.

    If the job's process groups are made anew after a fault, so is the strategy. The first use is collective: every
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

    @property
    def peers(self) -> tuple[int, ...]:
        """The global ranks that this rank exchanges parts with, this rank included."""
        return self.replication_strategy.peers

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


def agreed_jump(jump: int, factor: int) -> int:
    """Return the distance between the ranks of a clique, if all ranks ask for the same. Collective.

    Args:
        jump: the distance that this rank asks for; 0: the number of ranks on its node.
        factor: how many members a clique is to have.

    Raises:
        ValueError: the ranks ask for different cliques, or the size of the node is not known.
    """
    jump = jump or int(os.environ.get(LOCAL_WORLD_SIZE_ENV, "0"))
    asked = {(each[0], each[1]) for each in all_gather_json([jump, factor])}
    if len(asked) > 1:
        raise ValueError(
            f"the ranks ask for different cliques, as (jump, factor): {sorted(asked)}. "
            "Where nodes have different numbers of ranks, give replication_jump"
        )
    if not jump:
        raise ValueError(f"{LOCAL_WORLD_SIZE_ENV} is not set: give replication_jump, the ranks of a node")
    return jump


def clique_group(
    jump: int, factor: int, timeout: timedelta | None, backend: str | None = None
) -> dist.ProcessGroup:
    """Make the process groups of all cliques, and return that of this rank's. Collective: every rank calls it.

    All ranks make all groups. torch names a group that only its members make after the groups that each has made
    before, and these differ from rank to rank where Megatron has groups of single pipeline stages.

    Args:
        jump: the distance between the ranks of a clique.
        factor: how many members a clique has.
        timeout: how long a wait for another member may take; None: as long as torch waits by default.
        backend: the backend of the groups; None: that of the job.

    Raises:
        ValueError: the ranks of the job cannot be divided that way.
    """
    mine = None
    for members in all_cliques(dist.get_world_size(), jump, factor):
        group = dist.new_group(list(members), backend=backend, timeout=timeout)
        mine = group if dist.get_rank() in members else mine
    assert mine is not None, "every rank is in a clique"
    return mine


def timeout_of_the_job() -> timedelta | None:
    """Return the timeout of the default process group, which a new group does not inherit."""
    world = dist.distributed_c10d._get_default_group()
    try:
        return world._get_backend(wire_device()).options._timeout
    except (
        AttributeError,
        RuntimeError,
    ):  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend in one without options
        return None


def _all_of(exchange: Callable[[_Round], None], rounds: Sequence[_Round]) -> None:
    """Go through all rounds, even after damage in one: the others in the clique wait for the next round.

    Raises:
        TransferError: a part did not arrive whole.
        ValueError: a part cannot be put together here. The first error of all rounds is raised.
    """
    damage: TransferError | ValueError | None = None
    for each in rounds:
        try:
            exchange(each)
        except (TransferError, ValueError) as error:
            logger.warning("a part arrived incomplete: %s", error)
            damage = damage or error
    if damage is not None:
        raise damage
