"""Regrouping: an incident stops a generation, the ranks gather at the barrier, and the next generation begins.

The processes of ranks are asked for once their generation's store is open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from checkpointless.launcher.coordinator.hang_watch import HangWatch
from checkpointless.launcher.coordinator.incident_policy import GiveUpDecision
from checkpointless.launcher.coordinator.job import FAILED, Job, Phase, Rank
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.causes import Cause, CauseKind, exit_cause
from checkpointless.launcher.protocol.messages import COUNTED, IN_BLOCK, RankState
from checkpointless.observability.telemetry.event_names import EventName, Rung
from checkpointless.observability.telemetry.wording import plural


class Processes:
    """Has nodes open the store of the coming generation, and start the processes of ranks."""

    def __init__(self, job: Job) -> None:
        self._job = job
        # Ranks that wait for a store, by number: incarnation, and whether it is started on a bad device.
        self._to_start: dict[int, tuple[int, bool]] = {}

    def start_missing(self) -> None:
        """Have every rank that has no process started."""
        self.ensure_store()
        for rank in self._job.ranks:
            if rank.state is RankState.GONE:
                self.spawn(rank)

    def ensure_store(self) -> None:
        """Ask for the store of the coming generation, unless that has been done."""
        if self._job.rendezvous.generation != self._job.coming:
            self.ask_for_store()

    def ask_for_store(self) -> None:
        """Ask a node, or the first that joins if none is present, to open a store for the coming generation."""
        job, coming = self._job, self._job.coming
        here = (node for node in job.nodes if node.joined and node.index not in job.back_by_s)
        host = next(here, None)
        self._job.rendezvous.ask(coming if host else -1, host.index if host else -1)
        if host is not None:
            host.send(messages.OpenStore(coming))

    def restart_all(self) -> None:
        """Have every rank get a new process, for which nothing of the earlier ones counts."""
        self._to_start.clear()
        self.ensure_store()
        for rank in self._job.ranks:
            if rank.node.joined:  # else it is started when its node has joined
                self.spawn(rank)
                rank.first = rank.incarnation

    def store_opened(self) -> None:
        """Start the ranks that have waited for the store."""
        waiting, self._to_start = self._to_start, {}
        for number, (incarnation, anyway) in waiting.items():
            rank = self._job.ranks[number]
            if rank.state is RankState.STARTING and rank.incarnation == incarnation:
                self._start(rank, anyway)

    def was_asked_for(self, rank: Rank) -> bool:
        """Return whether the rank's node was asked to start the rank's newest process, so that it can exist."""
        incarnation, _ = self._to_start.get(rank.number, (None, False))
        return incarnation != rank.incarnation

    def spawn(self, rank: Rank) -> None:
        """Have the next process of ``rank`` started, as soon as there is a store for it."""
        rank.incarnation += 1
        rank.entered, rank.unfit = False, ""
        self._job.move(rank, RankState.STARTING)
        self._job.fresh.add(rank.number)
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

    def hand_over(self) -> bool:
        """Have processes hand over their state if one cannot enter its block again; return whether they do.

        All that were in their block go, because what one cannot do again the others could not, either. Where that
        was needed once, it is done at every fault.
        """
        job = self._job
        entered = [rank for rank in job.ranks if rank.entered]
        why = next((rank.unfit for rank in entered if rank.unfit), job.reenters_by_new_processes)
        incident = job.incidents.open
        if not why or not entered or incident is None or incident.handed_over:
            return False
        if not job.reenters_by_new_processes:
            job.say(f"incident {incident.id}: {why}; new processes take over, now and at every further fault")
        job.reenters_by_new_processes, incident.handed_over = why, True
        job.gather_by_s = job.clock() + job.config.regroup_timeout_s
        job.incidents.step_up(Rung.OWN_STATE, why)
        for node in job.nodes:
            numbers = [rank.number for rank in entered if rank.node is node]
            if numbers:
                node.send(messages.HandOver(job.generation, job.high_water, numbers))
        for rank in entered:
            job.move(rank, RankState.LEAVING)
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
        rank.node.send(messages.Spawn(rank.number, rank.incarnation, job.coming, incident_id, env, anyway, afresh))


_NO_RESTARTS = "; or begin again from the script's own checkpoint: --max-restarts N"
_FIRST_STEP = 1
SAME_FAILURE_S = 2.0  # for all ranks to raise what the first one raised before the first step
_STILLBORN_LIMIT = 5  # successors in one incident that end before they enter the block
_RETURN_TOGETHER_S = 1.0  # ranks that leave their training in the same step return within this time
_RETURNED = (
    "rank {} returned from its block in unfinished step {}, and other ranks did not: they wait for it until they "
    "count as stalled. A block that catches an exception hides a fault: let it leave the function"
)


def _may_be_certain(causes: Collection[Cause]) -> bool:
    """Return whether all of these causes are one exception before the first step, which all ranks may raise."""
    kinds = {(cause.kind, cause.how, cause.error, cause.message, cause.step) for cause in causes}
    return (
        len(kinds) == 1
        and next(iter(kinds))[:2] == (CauseKind.EXCEPTION, "exception")
        and all(cause.step == NO_STEP for cause in causes)
    )


def _certain_failure(causes: Mapping[int, Cause], world_size: int) -> GiveUpDecision | None:
    """Return the decision to end a job of which every rank raises the same before the first step."""
    if len(causes) < world_size or not _may_be_certain(causes.values()):
        return None
    first = min(causes.items())[1]
    who = "the only rank" if world_size == 1 else f"all {world_size} ranks"
    reason = f"{who} {first.what} before the first step: {first.detail}".removesuffix(": ")
    return GiveUpDecision(reason, first.traceback, is_final=True)


class Regrouping:
    """Takes a job from a fault to the next generation, and from its last block to its end.

    ``is_held_up`` returns whether a generation has to wait although all ranks are at the barrier.
    """

    def __init__(
        self, job: Job, processes: Processes, hangs: HangWatch, is_held_up: Callable[[], bool] = lambda: False
    ) -> None:
        self._job = job
        self._incidents = job.incidents
        self._processes = processes
        self._hangs = hangs
        self._is_held_up = is_held_up
        self._notify_at_s: float | None = None  # when ranks are interrupted that might raise the same by themselves
        self._began_over = NO_STEP  # the newest step that was committed when the generation began
        self._returned: tuple[float, str] | None = None  # a rank within a step: when to say so, and what
        self._one_ended = False  # whether a process has ended well since the job began, or began again

    # ---- from a fault to the barrier

    def fault(self, cause: Cause, since_s: float | None = None) -> None:
        """Open an incident, or add ``cause`` to the open one; ``since_s`` is when it happened (None: just now)."""
        if self._incidents.open is None:
            self._interrupt(cause, since_s)
        self._incidents.add_cause(cause, since_s)
        if self._notify_at_s is not None:
            self._look_whether_all_fail()
        if cause.kind is CauseKind.LOSS:
            decision = self._incidents.one_too_many(cause, self._job.high_water)
            if decision is not None:
                self._give_up(cause, decision)

    def _interrupt(self, cause: Cause, since_s: float | None) -> None:
        """Open an incident and interrupt the ranks that are in their block."""
        job = self._job
        self._incidents.begin(cause, since_s)
        self._hangs.forget()
        self._returned = None
        if job.phase is Phase.RUNNING:
            job.enter(Phase.GATHERING)
            if job.generation == job.origin and _may_be_certain([cause]):
                self._notify_at_s = job.clock() + SAME_FAILURE_S
            else:
                job.tell_nodes(self.interruption())
            for rank in self._job.ranks:
                if rank.state in IN_BLOCK:
                    self._job.move(rank, RankState.LEAVING)
        job.gather_by_s = job.clock() + job.config.regroup_timeout_s
        self._processes.ensure_store()

    def tick(self, now_s: float) -> None:
        """Interrupt the ranks if not all have raised in time what the first one has; name one that has returned."""
        if self._returned is not None and now_s >= self._returned[0]:
            self._job.say(self._returned[1])
            self._returned = None
        if self._notify_at_s is not None and now_s >= self._notify_at_s:
            self._notify()

    def _look_whether_all_fail(self) -> None:
        """End the job if every rank raises the same before the first step; interrupt the ranks if not all can."""
        incident = self._incidents.open
        assert incident is not None
        decision = _certain_failure(incident.by_rank, len(self._job.ranks))
        if decision is not None:
            self._give_up(incident.cause, decision)
        elif not _may_be_certain(incident.by_rank.values()):
            self._notify()

    def _notify(self) -> None:
        if self._notify_at_s is not None:
            self._notify_at_s = None
            self._job.tell_nodes(self.interruption())

    def interruption(self) -> messages.FaultNotice:
        """Return the notice that has ranks leave their block because of the open incident."""
        incident = self._incidents.open
        assert incident is not None
        return messages.FaultNotice(self._job.generation, incident.id, str(incident.cause), incident.cause.culprit)

    def ended(self, rank: Rank, ended: messages.RankEnded) -> None:
        """Act on the end of a rank's process: have it replaced, or end the job."""
        job, was = self._job, rank.state
        self._job.move(rank, RankState.GONE)
        entered = was in COUNTED
        if not entered and (was is RankState.FINISHED or (rank.incarnation == rank.first and not ended.forgiven)):
            if ended.code != 0:
                cause = exit_cause(rank.number, ended.code, NO_STEP)
                words = f"{cause}; its log: {ended.log_path}"
                if was is RankState.FINISHED:
                    job.end(FAILED, *ended.last_lines, words)
                else:
                    self._end_or_restart(cause, words, *ended.last_lines, words)
            elif not self._one_ended:
                self._one_ended = True
                job.tell_nodes(messages.OneEnded(rank.number))
            self.check_end()
            return
        cause = exit_cause(rank.number, ended.code, ended.making)
        if not entered:
            cause = exit_cause(rank.number, ended.code, NO_STEP, "before it entered the block")
        if not ended.forgiven or job.phase is Phase.RUNNING:
            self.fault(cause)
        incident = self._incidents.open
        if not entered and ended.was_started and incident is not None:
            incident.stillborn += 1
            if incident.stillborn >= _STILLBORN_LIMIT:
                many = f"{incident.stillborn} successors ended before they entered the block; the last: {cause}"
                self._end_or_restart(cause, many, *ended.last_lines, many)
                return
        if incident is not None:
            rung = Rung.OWN_STATE if ended.handed_over else Rung.PROCESS
            self._incidents.step_up(rung, str(incident.cause if ended.forgiven else cause))
        if job.outcome is None and rank.state is RankState.GONE:  # else the whole job begins again
            self._processes.spawn(rank)

    # ---- where the job would end

    def state_lost(self, generation: int, reason: str) -> None:
        """Act on a rank's word that no rank holds the state of ``generation`` any more."""
        job = self._job
        if job.phase is not Phase.RUNNING or generation != job.generation:
            return  # the other ranks have said so, and the job begins again
        limit = job.config.max_restarts
        more = f"; the job was restarted {plural(limit, 'time')}" if limit else _NO_RESTARTS
        lost = Cause(CauseKind.LOSS, None, "lost", "hold the state no more", NO_STEP, reason)
        self._end_or_restart(lost, reason, f"{reason}{more}")

    def _give_up(self, cause: Cause, decision: GiveUpDecision) -> None:
        """End the job, or begin it again if that could help."""
        words = decision.reason, decision.last_words.rstrip()
        if decision.is_final:
            self._job.end(FAILED, *words)
        else:
            self._end_or_restart(cause, decision.reason, *words)

    def _end_or_restart(self, cause: Cause, why: str, *last_words: str) -> None:
        """End the job; or begin it again with new processes, in an incident with ``cause`` if none is open."""
        job, limit = self._job, self._job.config.max_restarts
        if job.restarts >= limit or job.outcome is not None:
            job.end(FAILED, *last_words)
            return
        job.restarts += 1
        self._notify_at_s, self._one_ended = None, False
        job.enter(Phase.GATHERING)
        job.gather_by_s, job.origin, job.rendezvous.sources = None, job.coming, {}
        self._hangs.forget()
        number = f"restart {job.restarts} of {limit}"
        incident = self._incidents.restart(cause, f"{number}: {why}")
        job.say(
            f"incident {incident.id}: {number}: {why}; every rank begins again with what the script itself "
            "loads: steps after its checkpoint are repeated"
        )
        self._processes.restart_all()

    # ---- at the barrier

    def ready(self, rank: Rank) -> None:
        """Note that ``rank`` is at the barrier, and begin the next generation if it was the last one."""
        job = self._job
        if job.phase is Phase.RUNNING:
            self.fault(Cause(CauseKind.EXCEPTION, rank.number, "exit", "left the block", NO_STEP))
        self._job.move(rank, RankState.READY)
        if job.gather_by_s is None:
            job.gather_by_s = job.clock() + job.config.heartbeat.limit_s
        self.begin_if_all_are_here()
        self.check_end()

    def begin_if_all_are_here(self) -> None:
        """Begin the next generation if all ranks are at the barrier, and no node is expected back."""
        if not self._job.all_are(RankState.READY):
            return
        rendezvous = self._job.rendezvous
        if not rendezvous.is_open or rendezvous.generation != self._job.coming:
            # The next block of the same processes: the keys of the one before are in its store, and a coordinator
            # that took the job over has none.
            self._processes.ensure_store()
            return
        if self._job.back_by_s:
            return
        if not any(node.is_back for node in self._job.nodes):  # such a node is about to say what its ranks do
            self._begin()

    def too_late(self, now_s: float) -> None:
        """Act on ranks or nodes that have not come in time: replace the ranks once, then end the job."""
        job = self._job
        missing = self._what_is_missing()
        if missing:
            job.end(FAILED, missing)
            return
        late = [rank for rank in self._job.ranks if rank.state is not RankState.READY]
        if not late:  # a node that looks for this coordinator is waited for, and has a limit of its own
            return
        names = "rank " + ", ".join(str(rank.number) for rank in late)
        began = job.generation >= 0
        limit_s = job.config.regroup_timeout_s if began else job.config.heartbeat.limit_s
        if self._incidents.open is None:
            what = f"did not enter the block within {limit_s:g} s after the first rank did"
            cause = Cause(CauseKind.LOSS, late[0].number, "hang", what, NO_STEP)
            self.fault(cause, time.monotonic() - limit_s)  # the first rank was here, and this one had done nothing
        incident = self._incidents.open
        if incident is None or job.outcome is not None:
            return
        if incident.killed_the_late:
            did = "come back" if began else "enter the block"
            reason = f"{names} did not {did} within {limit_s:g} s, also not as a new process"
            self._end_or_restart(incident.cause, reason, reason)
        else:
            incident.killed_the_late = True
            job.gather_by_s = now_s + limit_s
            job.say(f"incident {incident.id}: {names} did not come back in time and is replaced")
            for rank in late:
                if rank.state is not RankState.GONE:
                    rank.node.send(messages.Kill(rank.number, rank.incarnation, job.generation))

    def _what_is_missing(self) -> str:
        """Return which node or store has not come in time; "" if only ranks are late, which can be replaced."""
        limit_s, rendezvous = self._job.config.regroup_timeout_s, self._job.rendezvous
        lost = next((node for node in self._job.nodes if node.lost), None)
        if lost is not None:
            return f"node {lost.index} was lost ({lost.lost}) and no other took its place within {limit_s:g} s"
        if not rendezvous.is_open:
            return f"node {rendezvous.host} opened no store for generation {self._job.coming} in time"
        return ""

    def _begin(self) -> None:
        job = self._job
        self._notify()
        newest = max(rank.committed for rank in job.ranks)
        self.resumed_at(newest)
        job.target = max(newest + 1, _FIRST_STEP, *(rank.making for rank in job.ranks))
        self._began_over = job.high_water
        oldest = min(rank.committed for rank in self._job.ranks)
        incident, decision = self._incidents.open, self._incidents.gathered(job.high_water, oldest)
        if decision is not None:
            assert incident is not None
            self._give_up(incident.cause, decision)
            return
        if self._is_held_up() or self._processes.hand_over():
            return
        self._incidents.regrouped(job.coming, job.target)
        job.enter(Phase.RUNNING)
        job.gather_by_s = None
        env = job.rendezvous.go_env()
        for rank in self._job.ranks:
            self._job.move(rank, RankState.RUNNING)
        self._hangs.forget()
        job.progress.forget()
        sources = {str(rank): source for rank, source in job.rendezvous.sources.items()}
        incident_id = incident.id if incident else None
        steps = job.high_water, job.target, job.origin
        job.tell_nodes(messages.Go(job.generation, incident_id, env, *steps, sources))
        self._incidents.emit(EventName.GO, "point", high_water=job.high_water)

    def began_after(self, step: int) -> None:
        """Note that the training of this generation began after ``step``; steps may have been made since."""
        newest = self._job.progress.newest
        if step < self._began_over:  # every rank is behind what was committed, so storage gave the state
            self._job.high_water, self._began_over = self._began_over, step
            self.resumed_at(step)
        self._job.high_water = newest

    def resumed_at(self, newest: int) -> None:
        """Note that the job resumes after step ``newest``, since no rank's board shows a later step."""
        if newest < self._job.high_water:  # every rank is behind what was committed, so storage gave the state
            self._incidents.fell_back(self._job.high_water, newest)
            self._job.fell_back(newest)
        self._job.high_water = newest

    # ---- the end

    def done(self, rank: Rank, unmade: int = NO_STEP) -> None:
        """Note that the block of ``rank`` has returned, perhaps with a step that it has begun and not made."""
        if rank.state is RankState.RUNNING:
            self._job.move(rank, RankState.DONE)
            if unmade != NO_STEP and self._job.in_state[RankState.DONE] == 1:
                at_s = self._job.clock() + _RETURN_TOGETHER_S
                self._returned = at_s, _RETURNED.format(rank.number, unmade)
            self.finish_if_all_are_done()

    def finish_if_all_are_done(self) -> None:
        """Have all processes end if every rank's block has returned."""
        if self._job.all_are(RankState.DONE):
            self.finish()

    def finish(self) -> None:
        """Have all processes end, since every rank's block has returned."""
        self._job.enter(Phase.FINISHING)
        self._returned = None
        self._incidents.recovered(self._job.high_water)
        for rank in self._job.ranks:
            if rank.state in IN_BLOCK:
                self._job.move(rank, RankState.FINISHED)
        self._job.tell_nodes(messages.Finish())

    def check_end(self) -> None:
        """End the job if all processes have ended, or if one has ended that the others wait for."""
        job = self._job
        if job.not_joined and self._job.phase is Phase.GATHERING:
            return  # ranks without a process are started when all nodes are here
        if job.in_state[RankState.GONE] <= len(job.not_joined) * job.nodes[0].nproc:
            return  # only the ranks of nodes that are lost or not ready yet are gone
        if job.all_are(RankState.GONE):
            self._job.end(0)
        elif job.in_state[RankState.READY]:
            gone = next(rank for rank in job.ranks if rank.state is RankState.GONE and rank.node.joined)
            waiting = next(rank for rank in job.ranks if rank.state is RankState.READY)
            self._job.end(
                FAILED, f"rank {gone.number} ended without entering the block that rank {waiting.number} waits in"
            )
