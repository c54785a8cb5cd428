"""What is done about a device that must not be used: its node is given up for a spare, or it is tried once more."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

from checkpointless.coordinator.job import Job, Phase
from checkpointless.coordinator.nodes.membership import Membership
from checkpointless.coordinator.processes import Processes
from checkpointless.coordinator.roster import Node, Rank
from checkpointless.telemetry.event_names import EventName
from checkpointless.wire.node_messages import DeviceBad, Holding
from checkpointless.wire.rank_state import RankState


class Remedy(Enum):
    """What to do about a rank whose device must not be used."""

    GIVE_UP = "give_up"  # a spare takes the node's place, with all of its ranks
    TRY = "try"  # the rank is started on the device although it is bad


def remedy(*, has_spare: bool, hosts_coordinator: bool, is_last_holder: bool, was_tried: bool) -> Remedy:
    """Return what to do.

    A node is given up whole, since ranks belong to nodes, so its other ranks lose what they hold. That costs only
    time if every shard of the node has another holder elsewhere. If one has not, the device is tried once first:
    should that work, no step is lost. If it fails again, the node is given up even so, because going back to
    storage is better than the end. Without a spare the device is tried each time, since the error may be over; the
    limits on incidents without progress end a job in which it is not. A node whose agent hosts the coordinator is
    never given up: that would end the job.

    Args:
        has_spare: whether a spare is ready.
        hosts_coordinator: whether the agent of the node hosts the coordinator.
        is_last_holder: whether the node is known to hold a shard that no living rank of another node holds.
        was_tried: whether a process of the rank was started on the device although it was bad, and no step was
            committed since.
    """
    if has_spare and not hosts_coordinator and (was_tried or not is_last_holder):
        return Remedy.GIVE_UP
    return Remedy.TRY


def is_last_holder(node: Node, ranks: Sequence[Rank], fresh: Collection[int]) -> bool:
    """Return whether a living rank of ``node`` holds a shard that no living rank of another node is known to hold.

    Ranks that have not said which shard they hold share the state with all others or have none, so they do not
    count.

    Args:
        ranks: all ranks of the job.
        fresh: numbers of the ranks whose processes may not have received any state yet.
    """
    living = [rank for rank in ranks if rank.state is not RankState.GONE and rank.number not in fresh]
    elsewhere = {rank.shard for rank in living if rank.node is not node}
    return any(rank.shard is not None and rank.shard not in elsewhere for rank in living if rank.node is node)


class BadDevices:
    """Acts on reports of devices that must not be used.

    Args:
        job: the job.
        membership: gives nodes up for spares.
        processes: starts processes.
    """

    def __init__(self, job: Job, membership: Membership, processes: Processes) -> None:
        self._job = job
        self._membership = membership
        self._processes = processes

    def note_holding(self, node: Node, message: Holding) -> None:
        """Note which shards the ranks of a node hold."""
        if self._job.roster.is_in_place(node):
            for rank, shard in zip(self._job.roster.ranks_of(node), message.shards):
                rank.shard = shard

    def hear(self, rank: Rank, message: DeviceBad, host: Node | None) -> None:
        """Act on a report.

        Args:
            rank: the rank whose process was to be started.
            host: the node whose agent runs this coordinator, if there is one.
        """
        job, node = self._job, rank.node
        is_meant = rank.state is RankState.STARTING and rank.incarnation == message.incarnation
        if not is_meant or job.phase is not Phase.GATHERING:
            return
        tried, tried_after = node.tried.get(rank.number, (-1, -1))
        if tried == message.incarnation:
            self._processes.start_anyway(rank)  # the answer may be lost, and one that comes twice is ignored
            return
        chosen = remedy(
            has_spare=any(spare.joined for spare in job.roster.spares),
            hosts_coordinator=node is host,
            is_last_holder=is_last_holder(node, job.roster.ranks, job.roster.fresh),
            was_tried=tried >= 0 and job.high_water <= tried_after,
        )
        why = f"the device of rank {rank.number} must not be used: {message.why}"
        job.incidents.emit(
            EventName.BAD_DEVICE,
            "point",
            rank=rank.number,
            node_number=node.index,
            why=message.why,
            remedy=chosen.value,
        )
        if chosen is Remedy.GIVE_UP:
            job.say(f"node {node.index} is given up for a spare: {why}")
            self._membership.give_up(node, why)
        else:
            node.tried[rank.number] = message.incarnation, job.high_water
            todo = "is started on it once more" if tried < 0 else "is started on it again: add a spare node"
            job.say(f"node {node.index} cannot be given up: {why}; rank {rank.number} {todo}")
            self._processes.start_anyway(rank)
