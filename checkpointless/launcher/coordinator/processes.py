"""The processes of ranks: asked for once their generation's store is open, and killed when they are late."""

from __future__ import annotations

from collections.abc import Iterable

from checkpointless.launcher.coordinator.job import Job
from checkpointless.launcher.coordinator.roster import Rank
from checkpointless.launcher.protocol.messages import HandOver
from checkpointless.launcher.protocol.node_messages import Kill, OpenStore, RankState, Spawn
from checkpointless.observability.telemetry.event_names import Rung


class Processes:
    """Has nodes open the store of the coming generation, and start and kill the processes of ranks."""

    def __init__(self, job: Job) -> None:
        self._job = job
        # Ranks that wait for a store, by number: incarnation, and whether it is started on a bad device.
        self._to_start: dict[int, tuple[int, bool]] = {}

    def start_missing(self) -> None:
        """Have every rank that has no process started."""
        self.ensure_store()
        for rank in self._job.roster.ranks:
            if rank.state is RankState.GONE:
                self.spawn(rank)

    def ensure_store(self) -> None:
        """Ask for the store of the coming generation, unless that has been done."""
        if self._job.rendezvous.generation != self._job.coming:
            self.ask_for_store()

    def ask_for_store(self) -> None:
        """Ask a node, or the first that joins if none is present, to open a store for the coming generation."""
        roster, coming = self._job.roster, self._job.coming
        here = (node for node in roster.nodes if node.joined and node.index not in roster.back_by_s)
        host = next(here, None)
        self._job.rendezvous.ask(coming if host else -1, host.index if host else -1)
        if host is not None:
            host.send(OpenStore(coming))

    def restart_all(self) -> None:
        """Have every rank get a new process, for which nothing of the earlier ones counts."""
        self._to_start.clear()
        self.ensure_store()
        for rank in self._job.roster.ranks:
            if rank.node.joined:  # else it is started when its node has joined
                self.spawn(rank)
                rank.first = rank.incarnation

    def store_opened(self) -> None:
        """Start the ranks that have waited for the store."""
        waiting, self._to_start = self._to_start, {}
        for number, (incarnation, anyway) in waiting.items():
            rank = self._job.roster.ranks[number]
            if rank.state is RankState.STARTING and rank.incarnation == incarnation:
                self._start(rank, anyway)

    def was_asked_for(self, rank: Rank) -> bool:
        """Return whether the rank's node was told to start the rank's newest process, so that it can exist."""
        incarnation, _ = self._to_start.get(rank.number, (None, False))
        return incarnation != rank.incarnation

    def spawn(self, rank: Rank) -> None:
        """Have the next process of ``rank`` started, as soon as there is a store for it."""
        rank.incarnation += 1
        rank.entered, rank.unfit = False, ""
        self._job.roster.move(rank, RankState.STARTING)
        self._job.roster.fresh.add(rank.number)
        if self._job.rendezvous.is_open:
            self._start(rank)
        else:
            self._to_start[rank.number] = rank.incarnation, False

    def start_anyway(self, rank: Rank) -> None:
        """Have the process that was asked for last started although the rank's device is bad."""
        if rank.state is not RankState.STARTING:
            return
        if self._job.rendezvous.is_open:
            self._start(rank, anyway=True)
        else:
            self._to_start[rank.number] = rank.incarnation, True

    def kill(self, ranks: Iterable[Rank], beat: int = -1) -> None:
        """Have the processes of ``ranks`` killed.

        Args:
            ranks: the ranks to kill; those without a process are left out.
            beat: the beat at which the rank hung; its node kills it only if it has not beaten since (-1: kill it
                in any case).
        """
        for rank in ranks:
            if rank.state is not RankState.GONE:
                rank.node.send(Kill(rank.number, rank.incarnation, self._job.generation, beat))

    def hand_over(self) -> bool:
        """Have processes hand their state to successors, if one of them cannot enter its block again.

        All that were in their block go, because what one cannot do again the others could not, either. Where that
        was needed once, it is done at every fault.

        Returns:
            Whether processes are on their way out.
        """
        job = self._job
        entered = [rank for rank in job.roster.ranks if rank.entered]
        why = next((rank.unfit for rank in entered if rank.unfit), job.reenters_by_new_processes)
        incident = job.incidents.open
        if not why or not entered or incident is None or incident.handed_over:
            return False
        if not job.reenters_by_new_processes:
            job.say(f"incident {incident.id}: {why}; new processes take over, now and at every further fault")
        job.reenters_by_new_processes, incident.handed_over = why, True
        job.gather_by_s = job.clock() + job.config.regroup_timeout_s
        job.incidents.step_up(Rung.OWN_STATE, why)
        for node in job.roster.nodes:
            numbers = [rank.number for rank in entered if rank.node is node]
            if numbers:
                node.send(HandOver(job.generation, job.high_water, numbers))
        for rank in entered:
            job.roster.move(rank, RankState.LEAVING)
            rank.entered = False
        return True

    def _start(self, rank: Rank, anyway: bool = False) -> None:
        if rank.node.is_back:
            return  # it is about to say that the rank has no process, and is told then
        job = self._job
        env = job.rendezvous.rank_env(rank.number, rank.node.index)
        afresh = job.origin == job.coming > 0
        incident = job.incidents.open
        incident_id = incident.id if incident is not None else ""
        rank.node.send(Spawn(rank.number, rank.incarnation, job.coming, incident_id, env, anyway, afresh))
