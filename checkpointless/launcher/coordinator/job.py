"""A job as its coordinator knows it: its members, its phase, its progress, its incidents, and how it ended.

An incident is open from its first cause until all ranks are together again. It is then recovering until the ranks
have made the step that it interrupted, or until the block has returned if no step was left. If the next fault comes
first, the incident is escalated: the next one reports the rest.

A fault counts from when it happened, as far as that is known: a rank that hangs from its last progress, a node that
is silent from its last word. All figures follow from that, through the ``undetected_s`` of the event ``detect``.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from checkpointless.launcher.coordinator.incident_policy import GiveUpDecision, History
from checkpointless.launcher.coordinator.job_config import JobConfig
from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.causes import Cause, CauseKind, attribute
from checkpointless.launcher.protocol.messages import Command, End, Progress, RankState, Standing
from checkpointless.observability.telemetry.event_names import EventName, Rung
from checkpointless.observability.telemetry.events import Edge, EventLog
from checkpointless.observability.telemetry.wording import INCIDENT, plural
from checkpointless.system import environment

NOT_YET = "it has not joined yet"


@dataclass
class Node:
    """A node of the job.

    Attributes:
        back_by_s: until when it had to come back, on the coordinator's clock; if it is gone again before it has
            said what its ranks do, it has no longer than that.
        is_reserved: whether it takes nobody's place: a node's ranks are moving to it, or its own have moved away.
        tried: the ranks of which a process was started although their device is bad, with its incarnation and the
            highest committed step of that time.
    """

    index: int
    nproc: int
    send: Callable[[Command], None]
    joined: bool = False
    lost: str = ""  # why the node's agent can no longer be reached ("" if it can)
    searching: bool = False  # whether the node said that it lost the coordinator, and has not come back yet
    is_back: bool = False  # whether the node has come back to its own place, and has not said yet what its ranks do
    back_by_s: float = 0.0
    speaks_by_s: float = 0.0  # until when a node that is back has to say so, on the coordinator's clock
    is_reserved: bool = False
    tried: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Rank:
    """A rank as the coordinator knows it."""

    number: int
    node: Node
    state: RankState = RankState.GONE  # as its node's agent sees it, or will after the last command
    incarnation: int = -1
    committed: int = NO_STEP
    making: int = NO_STEP
    shard: int | None = None  # the first of the ranks that hold the same state as this one (None: not known)
    first: int = 0  # incarnation of the rank's first process since the job began, or began again
    entered: bool = False  # whether the process that is at the barrier was in its block before
    unfit: str = ""  # why that process cannot enter its block again ("": it can)


def _nowhere(command: Command) -> None:
    raise RuntimeError(f"{command.type!r} for a node that has not joined")


@dataclass
class _Incident:
    """An incident that is not over."""

    id: str
    opened_at_s: float
    cause: Cause  # the cause that explains all causes that are known so far
    since_s: float | None = None  # when its fault happened, on the monotonic clock (None: it was noticed at once)
    together_at_s: float = 0.0
    target: int = NO_STEP
    by_rank: dict[int, Cause] = field(default_factory=dict)  # the last cause of each rank that has one
    said: Cause | None = None
    killed_the_late: bool = False
    counted: bool = False
    handed_over: bool = False
    stillborn: int = 0  # how many successors ended before they entered the block
    rung: Rung = Rung.IN_PROCESS
    steps_lost: int = 0
    restarted: bool = False
    inexact: dict[int, str] = field(default_factory=dict)  # what is not exact after it, by rank

    @property
    def deviation(self) -> str:
        """What is not exact after it, in one line; "" as long as nothing is known to be."""
        if not self.inexact:
            return ""
        first = min(self.inexact)
        others = len(self.inexact) - 1
        more = f" ({plural(others, 'other rank')} too)" if others else ""
        return f"rank {first}: {self.inexact[first]}{more}"

    @property
    def fault_at_s(self) -> float:
        """When the fault happened, as far as that is known, on the monotonic clock."""
        return self.opened_at_s if self.since_s is None else self.since_s

    @property
    def undetected_s(self) -> float | None:
        """The seconds from the fault until now; None if it was noticed at once."""
        return None if self.since_s is None else max(0.0, time.monotonic() - self.since_s)


class _IncidentTracker:
    """Follows the incidents of a job and reports them to the event log and the terminal.

    Attributes:
        open: the incident whose ranks are not together again.
        recovering: the incident whose ranks are together again and make the lost step.
        inexact: the number of incidents after which the job resumed, and was another one.
    """

    def __init__(self, max_incidents: int | None, events: EventLog, say: Callable[[str], None]) -> None:
        self.generation = -1
        self.open: _Incident | None = None
        self.recovering: _Incident | None = None
        self.inexact = 0
        self._resumed: _Incident | None = None  # the last one that the job resumed after
        self._overtaken: _Incident | None = None  # until it is known whether its step had been made
        self._count = 0
        self._history = History(max_incidents)
        self._events = events
        self._say = say

    def adopt(self, generation: int, incidents: int) -> None:
        """Take over a job that is in ``generation`` and has been through ``incidents`` incidents."""
        self.generation, self._count = generation, incidents
        self._history = replace(self._history, incidents=incidents)

    def begin(self, cause: Cause, since_s: float | None = None) -> _Incident:
        """Open an incident, whose fault happened at ``since_s`` (None: it was noticed at once)."""
        self._count += 1
        self._overtaken, self.recovering = self.recovering, None
        self.open = _Incident(str(self._count), time.monotonic(), cause, since_s)
        return self.open

    def add_cause(self, cause: Cause, since_s: float | None = None) -> None:
        """Add a cause to the open incident, and report the cause if it explains the others; see :meth:`begin`."""
        assert self.open is not None
        if since_s is not None:
            self.open.since_s = min(self.open.fault_at_s, since_s)
        self.open.cause = attribute([self.open.cause, cause])
        if cause.rank is not None:
            self.open.by_rank[cause.rank] = cause
        if self.open.cause.kind is not CauseKind.VICTIM:
            self._tell(self.open)

    def one_too_many(self, cause: Cause, high_water: int) -> GiveUpDecision | None:
        """Return why the job must end if one more incident with this cause would be one too many, else None."""
        return self._history.after(cause, high_water)[1]

    def gathered(self, high_water: int, oldest: int) -> GiveUpDecision | None:
        """Count the open incident, now that all are at the barrier; return why the job must end, if it must.

        ``high_water`` is the highest step that any rank was seen to commit, ``oldest`` the newest that every rank
        has.
        """
        if self.open is None or self.open.counted:  # counted: processes were replaced at the barrier
            return None
        self.open.counted = True
        if self._overtaken is not None:
            self._judge_overtaken(self._overtaken, high_water, oldest, self.open)
        self._overtaken = None
        self._tell(self.open)
        if self.open.restarted:  # what came before says nothing of the job that begins again
            self._history = History(self._history.max_incidents, self._history.incidents)
            return None
        self._history, give_up = self._history.after(self.open.cause, high_water)
        return give_up

    def restart(self, cause: Cause, why: str) -> _Incident:
        """Record that the whole job begins again: the incident that is not over, or a new one, goes up to that."""
        incident = self.open or self.recovering or self.begin(cause)
        self.open, self.recovering = incident, None
        incident.restarted, incident.counted = True, False
        self._tell(incident)
        incident.rung = Rung.JOB
        self.emit(EventName.RUNG, "point", rung=Rung.JOB.label, why=why)
        return incident

    def regrouped(self, generation: int, target: int) -> None:
        self.generation = generation
        self.open, self.recovering = None, self.open
        if self.recovering is not None:
            self.recovering.together_at_s, self.recovering.target = time.monotonic(), target

    def step_up(self, rung: Rung, why: str) -> None:
        """Raise the incident that is not over to this recovery level, if its recovery is still below it."""
        incident = self.open or self.recovering
        if incident is not None and rung > incident.rung:
            incident.rung = rung
            self.emit(EventName.RUNG, "point", rung=rung.label, why=why)

    def fell_back(self, high_water: int, newest: int) -> None:
        """Record that the state after step ``newest`` was brought back; ``high_water`` had been committed."""
        self._history = self._history.fell_back(high_water, newest)
        if self.recovering is not None:
            self.recovering.steps_lost += high_water - newest
            back = "nothing" if newest == NO_STEP else f"step {newest}"
            who = "the script itself" if self.recovering.restarted else "storage or copies"
            why = f"{who} brought {back} back; step {high_water} had been committed"
            self.step_up(Rung.JOB, why)
            self._say(f"incident {self.recovering.id}: {why}")

    def not_exact(self, rank: int, generation: int, reason: str) -> None:
        """Record that a redone step is not the one that it was."""
        if generation != self.generation:
            return
        incident = self.recovering or self._overtaken or self._resumed
        if incident is None:
            self._say(f"the job is not exact since its last incident: rank {rank}: {reason}")
            return
        incident.inexact.setdefault(rank, reason)
        if incident is self._resumed and len(incident.inexact) == 1:  # its last line has said nothing of it
            self.inexact += 1
            self._say(f"{INCIDENT}{incident.id}: resumed, not exact: {incident.deviation}")

    def recovered(self, newest: int) -> None:
        """Record that every rank has made the step that was interrupted, or that the block has returned.

        If no step was committed (``newest`` is -1), the job's steps are not known, and the incident was over when
        all ranks were in their block again.
        """
        incident, self.recovering = self.recovering, None
        if incident is not None:
            self._recovered(incident, newest, incident.together_at_s if newest == NO_STEP else time.monotonic())

    def _recovered(self, incident: _Incident, newest: int, at_s: float) -> None:
        seconds, rung = max(0.0, at_s - incident.fault_at_s), incident.rung.label
        lost, step = (None, None) if newest == NO_STEP else (incident.steps_lost, newest)
        made = newest >= incident.target
        self._resumed = incident
        self.inexact += bool(incident.inexact)
        about: dict[str, Any] = {"steps_lost": lost, "step": step, "made": made, "inexact": incident.deviation}
        self.emit(EventName.RECOVERED, "point", of=incident, seconds=seconds, rung=rung, **about)
        self._say(_recovered_line(incident, seconds, lost, made))

    def _judge_overtaken(self, incident: _Incident, high_water: int, oldest: int, following: _Incident) -> None:
        """Record whether the step of an incident had been made when the following one came, as all boards say."""
        if oldest >= incident.target:
            self._recovered(incident, high_water, following.fault_at_s)
        else:
            self.emit(EventName.ESCALATED, "point", of=incident, rung=incident.rung.label)
            what = f"escalated: incident {following.id} came before a step was made"
            self._say(f"{INCIDENT}{incident.id}: {what}")

    def emit(
        self,
        stage: EventName,
        edge: Edge,
        *,
        rank: int | None = None,
        of: _Incident | None = None,
        **fields: object,
    ) -> None:
        """Write an event of an incident; by default, of the one that is not over, if there is one."""
        incident, generation = of or self.open or self.recovering, max(self.generation, 0)
        number = incident.id if incident else None
        self._events.emit(stage, edge, generation=generation, incident=number, rank=rank, **fields)

    def _tell(self, incident: _Incident) -> None:
        cause = incident.cause
        if cause is incident.said:
            return
        incident.said = cause
        undetected_s = incident.undetected_s
        late: dict[str, Any] = {} if undetected_s is None else {"undetected_s": undetected_s}
        about: dict[str, Any] = {"cause": str(cause), "culprit": cause.culprit, "how": cause.how, "who": cause.who}
        self._say(f"{INCIDENT}{incident.id}: {cause}; recovering")
        self.emit(EventName.DETECT, "point", **about, **late)


def _recovered_line(incident: _Incident, seconds: float, steps_lost: int | None, made: bool) -> str:
    """Return the last line of an incident.

    ``steps_lost`` is None if nobody said which steps were committed; ``made`` is False if the block has returned
    without another step.
    """
    lost = {None: "", 0: "" if incident.deviation else "; nothing was lost", 1: "; 1 step is made once more"}
    many = f"; {steps_lost} steps are made once more"
    left = "" if made or steps_lost is None else "; no step was left to make"
    level = "new process, own state" if incident.rung is Rung.OWN_STATE else incident.rung.label
    how, why = ("resumed, not exact,", f"; {incident.deviation}") if incident.deviation else ("recovered", "")
    return f"{INCIDENT}{incident.id}: {how} in {seconds:.2f} s ({level}){lost.get(steps_lost, many)}{left}{why}"


FAILED = 1  # the exit code whatever the reason, as with torchrun


class Phase(Enum):
    """What a job is doing.

    ``JOINING`` goes to ``GATHERING`` once all nodes can start processes. ``GATHERING`` and ``RUNNING`` alternate: a
    generation begins, and an incident stops it. ``RUNNING`` goes to ``FINISHING`` once every rank's block has
    returned. Every phase can go to ``OVER``, and none follows it. A coordinator that takes a running job over goes
    from ``JOINING`` through ``GATHERING`` to the phase that it finds the job in.
    """

    JOINING = "nodes join; no process has been asked for"
    GATHERING = "ranks are on their way to the barrier"
    RUNNING = "ranks are in their block"
    FINISHING = "every rank's block has returned; processes end"
    OVER = "the job has ended"


class Job:
    """The state of a job, which the parts of the coordinator share.

    Attributes:
        in_state: how many ranks are in each state, so that no message requires a look at all of them.
        fresh: numbers of the ranks whose processes were started since all ranks had committed a step: they may hold
            no state yet.
        not_joined: numbers of the nodes that cannot start processes, including the lost ones.
        back_by_s: by when the nodes that look for this coordinator have to be back, on the coordinator's clock.
        host: the node whose agent runs this coordinator; None if it runs in a separate process.
        high_water: the highest optimizer step that any rank was seen to commit (-1: none).
        target: the step after which the recovery is over (-1: none).
        origin: the generation that begins from nothing: 0, or that of the last restart of the whole job.
        reenters_by_new_processes: why new processes take over at every fault ("": living ones enter again).
        standings: what nodes said of ranks that an earlier coordinator had them start, by node.
        replace_at_s: when missing nodes of a job that is taken over are replaced (None: none is waited for).
        gather_by_s: by when nodes and ranks have to be together (None: no limit runs).
        outcome: how the job ended; None as long as it has not.
    """

    def __init__(
        self, config: JobConfig, *, events: EventLog, say: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self.config = config
        nnodes, nproc = config.nnodes, config.nproc_per_node
        self.say = say
        self.clock = clock
        self.nodes = [Node(index, nproc, _nowhere, lost=NOT_YET) for index in range(nnodes)]
        self.spares: list[Node] = []
        self.host: Node | None = None
        self.ranks = [Rank(node.index * nproc + local, node) for node in self.nodes for local in range(nproc)]
        self.in_state = Counter({RankState.GONE: len(self.ranks)})
        self.not_joined = set(range(nnodes))
        self.fresh: set[int] = set()
        self.back_by_s: dict[int, float] = {}
        self.standings: dict[int, Standing] = {}
        self.rendezvous = _Rendezvous(nnodes, nproc)
        self.incidents = _IncidentTracker(config.max_incidents, events, say)
        self.progress = _ProgressReports(nnodes)
        self.high_water = NO_STEP
        self.target = NO_STEP
        self.origin = 0
        self.restarts = 0
        self.reenters_by_new_processes = ""
        self.gather_by_s: float | None = clock() + config.join_timeout_s
        self.replace_at_s: float | None = None
        self.outcome: End | None = None
        self.phase = Phase.JOINING

    def enter(self, phase: Phase) -> None:
        """Go on to another phase, unless the job is over; nothing else sets the phase."""
        if self.phase is not Phase.OVER:
            self.phase = phase

    @property
    def generation(self) -> int:
        """The generation that began last (-1: none)."""
        return self.incidents.generation

    @property
    def coming(self) -> int:
        """The generation that begins next."""
        return self.generation + 1

    def fell_back(self, step: int) -> None:
        """Note that the job resumes after ``step``, earlier than what was committed."""
        for node in self.nodes:
            node.tried = {rank: (number, min(after, step)) for rank, (number, after) in node.tried.items()}

    def put_in_place(self, node: Node, index: int) -> None:
        """Give ``node`` the number ``index`` and the ranks that belong to it."""
        node.index = index
        self.nodes[index] = node
        for rank in self.ranks_of(node):
            rank.node = node

    def free_spare(self) -> Node | None:
        """Return a node that can take another one's place; None: there is none."""
        free = (each for each in self.spares if each.joined and not each.is_reserved)
        return next(free, None)

    def is_in_place(self, node: Node) -> bool:
        """Return whether ``node`` is one of the job's nodes: neither a spare nor replaced."""
        return node.index >= 0 and self.nodes[node.index] is node

    def ranks_of(self, node: Node) -> list[Rank]:
        """Return the ranks of a node that is in place."""
        return self.ranks[node.index * node.nproc : (node.index + 1) * node.nproc]

    def rank_of(self, number: int, node: Node) -> Rank:
        """Return the rank with this number; ``ValueError`` if ``node``, which speaks of it, does not run it."""
        if not 0 <= number < len(self.ranks) or self.ranks[number].node is not node:
            raise ValueError(f"node {node.index} named rank {number}, which it does not run")
        return self.ranks[number]

    def move(self, rank: Rank, state: RankState) -> None:
        """Move a rank to another state; nothing else sets the state, so the count is right."""
        self.in_state[rank.state] -= 1
        self.in_state[state] += 1
        rank.state = state

    def all_are(self, state: RankState) -> bool:
        """Return whether every rank is in ``state``."""
        return self.in_state[state] == len(self.ranks)

    def end(self, code: int, *last_words: str) -> None:
        """End the job, unless it has ended already; empty lines of ``last_words`` are left out."""
        if self.outcome is None:
            self.outcome = End(code, [line for line in last_words if line])
            self.enter(Phase.OVER)
            self.tell_nodes(self.outcome)

    def tell_nodes(self, command: Command) -> None:
        """Send a command to every node that has joined; that the job is over is sent to spares, too."""
        for node in (*self.nodes, *(self.spares if isinstance(command, End) else ())):
            if node.lost != NOT_YET:
                node.send(command)


class _ProgressReports:
    """The latest report of each node on how far its ranks have come; they name only a few different steps."""

    def __init__(self, nnodes: int) -> None:
        self._nnodes = nnodes
        self._said: dict[int, Progress] = {}
        self._oldest: Counter[int] = Counter()
        self._newest: Counter[int] = Counter()
        self._timed = 0  # how many nodes know how long a step takes
        self._longest_ms = 0

    @property
    def are_complete(self) -> bool:
        return len(self._said) == self._nnodes

    @property
    def oldest(self) -> int:
        return min(self._oldest)

    @property
    def newest(self) -> int:
        return max(self._newest)

    @property
    def longest_s(self) -> float:
        """The longest time that any rank took from one beat to the next in a step; 0 until every node knows."""
        return self._longest_ms / 1000 if self._timed == self._nnodes else 0.0

    def began_after(self, generation: int) -> int:
        """Return the newest step that a training of a generation began after, or else the newest committed one.

        A report may have been under way when a generation began.
        """
        told = [said.began_after for said in self._said.values() if said.generation == generation]
        newest = max(told, default=NO_STEP)
        return self.newest if newest == NO_STEP else newest

    def put(self, node: int, progress: Progress) -> None:
        self.drop(node)
        self._said[node] = progress
        self._oldest[progress.oldest] += 1
        self._newest[progress.newest] += 1
        self._timed += progress.longest_ms > 0
        self._longest_ms = max(self._longest_ms, progress.longest_ms)

    def drop(self, node: int) -> None:
        before = self._said.pop(node, None)
        if before is not None:
            self._oldest -= Counter((before.oldest,))  # which drops a step that no node is at
            self._newest -= Counter((before.newest,))
            self._timed -= before.longest_ms > 0

    def forget(self) -> None:
        for report in (self._said, self._oldest, self._newest):
            report.clear()
        self._timed = self._longest_ms = 0


class _Rendezvous:
    """Where the ranks of the coming generation meet: a store in the agent of node ``host``."""

    def __init__(self, nnodes: int, nproc: int) -> None:
        self.nnodes = nnodes
        self.nproc = nproc
        self.run_id = uuid.uuid4().hex
        self.sources: dict[int, str] = {}  # from where ranks that have moved fetch their state, by rank
        self.generation = -1
        self.host = -1
        self._where: tuple[str, int] | None = None

    @property
    def is_open(self) -> bool:
        return self._where is not None

    def ask(self, generation: int, host: int) -> None:
        """Note that node ``host`` is asked for the store of ``generation``; none is open until it says where."""
        self.generation, self.host, self._where = generation, host, None

    def opened(self, generation: int, host: int, address: str, port: int) -> bool:
        """Note that a node has opened a store; return whether it is the one that was asked for."""
        if (generation, host) != (self.generation, self.host):
            return False
        self._where = (address, port)
        return True

    def go_env(self) -> dict[str, str]:
        """Return the environment variables of a rank that change when the generation begins."""
        if self._where is None:
            raise RuntimeError(f"generation {self.generation} has no store")
        address, port = self._where
        return {
            environment.MASTER_ADDR_ENV: address,
            environment.MASTER_PORT_ENV: str(port),
            environment.TORCHELASTIC_RESTART_COUNT_ENV: str(self.generation),
            environment.JOB_RESTART_COUNT_ENV: str(self.generation),
        }

    def rank_env(self, rank: int, node: int) -> dict[str, str]:
        """Return all environment variables that a new rank needs to join the generation, named as by torchrun."""
        world_size = str(self.nnodes * self.nproc)
        return {
            environment.RANK_ENV: str(rank),
            environment.LOCAL_RANK_ENV: str(rank % self.nproc),
            environment.ROLE_RANK_ENV: str(rank),
            environment.WORLD_SIZE_ENV: world_size,
            environment.LOCAL_WORLD_SIZE_ENV: str(self.nproc),
            environment.ROLE_WORLD_SIZE_ENV: world_size,
            environment.ROLE_NAME_ENV: "default",
            environment.NODE_RANK_ENV: str(node),
            environment.GROUP_RANK_ENV: str(node),
            environment.GROUP_WORLD_SIZE_ENV: str(self.nnodes),
            environment.TORCHELASTIC_RUN_ID_ENV: self.run_id,
            environment.TORCHELASTIC_MAX_RESTARTS_ENV: "0",
            environment.TORCHELASTIC_USE_AGENT_STORE_ENV: "True",
            **(self.go_env() if self.is_open else {}),  # a coordinator that took the job over has opened none yet
            environment.SOURCE_ENV: self.sources.get(rank, ""),
        }
