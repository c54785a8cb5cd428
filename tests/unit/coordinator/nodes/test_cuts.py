"""Test a job whose connections are cut at random, while processes and machines are lost."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from checkpointless.launcher.coordinator.coordinator import Coordinator
from checkpointless.launcher.coordinator.job import Node, Phase
from checkpointless.launcher.coordinator.job_config import JobConfig
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.messages import IN_BLOCK, Command, End, Go, NodeMessage, RankEnded, RankState
from checkpointless.observability.telemetry.events import EventLog
from tests.unit.messaged_job import at_barrier

NPROC = 2
HEARTBEAT_S, REGROUP_S = 60.0, 120.0
STARTING, READY, RUNNING, LEAVING, DONE, FINISHED, GONE = RankState


class ModelAgent:
    """Represents the agent of a node and its processes, without any process.

    Attributes:
        ranks: state and incarnation of each rank that was ever started here.
        node: the coordinator's end of the connection; None while there is none.
        inbox, outbox: commands and messages that are under way.
        healthy_ended: how often a process was ended although it was well.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.ranks: dict[int, tuple[RankState, int]] = {}
        self.node: Node | None = None
        self.inbox: deque[Command] = deque()
        self.outbox: deque[NodeMessage] = deque()
        self.outcome: End | None = None
        self.healthy_ended = 0
        self._generation, self._incident, self._run_id, self._finished = -1, "", "", False
        self._committed = -1
        self._ended: dict[int, RankEnded] = {}  # of the ranks that have no process

    def alive(self) -> list[int]:
        return [number for number, (state, _) in self.ranks.items() if state is not GONE]

    def connected(self, node: Node) -> None:
        """Say what the agent says first on a connection: how ranks ended, and what the others do."""
        self.node = node
        self.inbox.clear()
        self.outbox.clear()
        if not self.ranks:
            self.outbox.append(messages.Joined())
            return
        self.outbox.extend(self._ended.values())
        rows = [
            messages.RankStanding(number, many, state, self._committed, self._committed + 1)
            for number, (state, many) in self.ranks.items()
        ]
        incident = int(self._incident or 0)
        said = self._generation, incident, self._committed, self._run_id, self._finished
        self.outbox.append(messages.Standing(*said, rows))

    def obey(self, command: Command) -> None:
        """Do what the coordinator says, unless that would end the agent, or a process that is well."""
        match command:
            case messages.OpenStore():
                self.outbox.append(messages.StoreOpened(command.generation, "10.0.0.1", 5000))
            case messages.Spawn():
                state, incarnation = self.ranks.get(command.rank, (GONE, -1))
                assert state is GONE, f"{command.rank}.{command.incarnation} is to be started: {incarnation} lives"
                self.ranks[command.rank] = STARTING, command.incarnation
                self._ended.pop(command.rank, None)
                self._generation = max(self._generation, command.generation - 1)
                self._incident, self._run_id = command.incident, command.env["TORCHELASTIC_RUN_ID"]
            case Go():
                self._generation, self._incident, self._finished = command.generation, command.incident or "", False
                self._move({READY: RUNNING})
                self._committed = command.high_water + 1
            case messages.FaultNotice():
                self._incident = command.incident
                self._move(dict.fromkeys(IN_BLOCK, LEAVING))
            case messages.Kill():
                state, incarnation = self.ranks.get(command.rank, (GONE, -1))
                if (incarnation, self._generation) == (command.incarnation, command.generation):
                    assert state is GONE, f"rank {command.rank} is killed, and was {state.value}"
            case messages.Finish():
                self._finished = True
                self._move(dict.fromkeys(IN_BLOCK, FINISHED))
            case messages.Discard():
                self.healthy_ended += len(self.alive())
                self._move(dict.fromkeys(RankState, GONE))
                self._ended.clear()
                self.outbox.append(messages.Joined())
            case End():
                self.outcome = command

    def goes_on(self, number: int, *, has_next_block: bool = True) -> None:
        """Have a rank do what it does next if nothing happens to it, except that its block does not return."""
        state, incarnation = self.ranks[number]
        if state in (STARTING, LEAVING) or (state is FINISHED and has_next_block):
            self.ranks[number] = READY, incarnation
            self._say(at_barrier(number, incarnation, self._committed, self._committed + 1))

    def returns(self, number: int) -> None:
        state, incarnation = self.ranks[number]
        if state is RUNNING:
            self.ranks[number] = DONE, incarnation
            self._say(messages.Done(self._generation, rank=number))

    def dies(self, number: int, code: int = -9) -> None:
        _, incarnation = self.ranks[number]
        self.ranks[number] = GONE, incarnation
        here = {"committed": self._committed, "making": self._committed + 1}
        about: dict[str, Any] = {"rank": number, "incarnation": incarnation, **here}
        self._ended[number] = ended = RankEnded(code, False, "rank.log", [], **about)
        self._say(ended)

    def _say(self, message: NodeMessage) -> None:
        if self.node is not None:
            self.outbox.append(message)

    def _move(self, moves: dict[RankState, RankState]) -> None:
        self.ranks = {number: (moves.get(state, state), many) for number, (state, many) in self.ranks.items()}


class CutJob:
    """Runs a job of model agents, in which one thing after another happens in an order that ``seed`` determines.

    ``story`` is what happened, for a test that fails; ``deaths`` is how many processes the test ended itself.
    """

    def __init__(self, seed: int, nnodes: int = 3) -> None:
        self.random = random.Random(seed)
        self.story: list[str] = []
        self.now_s = 0.0
        self.deaths = 0
        self.agents = [ModelAgent(index) for index in range(nnodes)]
        self.coordinator = self._new_coordinator()

    def train(self) -> None:
        """Have nothing happen until all ranks train; reconnect whoever is cut off."""
        for _ in range(200):
            for agent in self.agents:
                self.connect(agent)
            self.deliver_all()
            for agent in self.agents:
                for number in agent.alive():
                    agent.goes_on(number)
            self.deliver_all()
            if self.coordinator.job.outcome is not None:
                break
            states = [state for agent in self.agents for state, _ in agent.ranks.values()]
            all_train = len(states) == len(self.coordinator.ranks) and set(states) <= set(IN_BLOCK)
            if all_train and self.coordinator.job.phase is Phase.RUNNING:
                return
            self.now_s += 0.5
            self.coordinator.tick(self.now_s)
        self.fail(f"the job does not train: {self.coordinator.job.phase}, {self.coordinator.job.outcome}")

    def finish(self) -> None:
        """Have all blocks return and all processes end, while connections are cut and made again."""
        for agent in self.agents:
            for number in agent.alive():
                agent.returns(number)
        while self.coordinator.job.outcome is None and self.now_s < 1e4:
            self.now_s += 0.01
            self.coordinator.tick(self.now_s)
            agent, chance = self.random.choice(self.agents), self.random.random()
            if chance < 0.04:
                self.cut(agent, says_so=self.random.random() < 0.5)
            elif chance < 0.3:
                self.connect(agent)
            elif chance < 0.5:
                self.deliver_one(agent)
            elif chance < 0.7:
                self.deliver_to(agent)
            else:
                for number in agent.alive():
                    if agent.ranks[number][0] is FINISHED:
                        agent.dies(number, 0)
                    else:
                        agent.goes_on(number, has_next_block=False)
                        agent.returns(number)
        if self.coordinator.job.outcome != End(0, []):
            self.fail(f"the job did not end well: {self.coordinator.job.outcome}")

    def happen(self) -> None:
        agent, chance = self.random.choice(self.agents), self.random.random()
        alive, job = agent.alive(), self.coordinator.job
        if chance < 0.35:
            self.deliver_one(agent)
        elif chance < 0.60:
            self.deliver_to(agent)
        elif chance < 0.78 and alive:
            agent.goes_on(self.random.choice(alive))
        elif chance < 0.80 and alive:
            agent.returns(self.random.choice(alive))
        elif chance < 0.85 and alive:
            number = self.random.choice(alive)
            state, incarnation = agent.ranks[number]
            known = self.coordinator.ranks[number].state
            if job.generation < 0 or {state, known} & {DONE, FINISHED} or known is STARTING:
                return  # too many that die before they enter the block end the job, as does one that dies after it
            self.story.append(f"rank {number}.{incarnation} dies as {state.value}")
            self.deaths += 1
            agent.dies(number)
        elif chance < 0.88 and job.generation >= 0:
            self.cut(agent, says_so=self.random.random() < 0.8)
        elif chance < 0.885 and job.generation >= 0 and job.phase is not Phase.FINISHING:
            self.replace(agent)
        elif chance < 0.887 and job.generation >= 0:
            self.lose_coordinator()
        elif chance < 0.98:
            self.connect(agent)
        else:
            self.now_s += self.random.choice((0.1, 1.0, 4.0))
            self.coordinator.tick(self.now_s)

    def cut(self, agent: ModelAgent, *, says_so: bool) -> None:
        """Cut a connection; of what is under way, some arrives."""
        if agent.node is None:
            return
        for _ in range(len(agent.outbox) if says_so else self.random.randint(0, len(agent.outbox))):
            self.deliver_one(agent)  # all of it comes before the word that the node looks for the coordinator
        for _ in range(self.random.randint(0, len(agent.inbox))):
            self.deliver_to(agent)
        node, agent.node = agent.node, None
        self.story.append(f"node {agent.index} is cut, says_so={says_so}")
        if says_so:
            self.coordinator.hear(node, messages.Searching())
        self.coordinator.membership.lose(node, "it was cut")
        agent.inbox.clear()
        agent.outbox.clear()

    def replace(self, agent: ModelAgent) -> None:
        """Have a machine be lost with all its processes, and another one be there for its place."""
        self.cut(agent, says_so=self.random.random() < 0.2)
        self.story.append(f"node {agent.index} is another machine")
        self.deaths += len(agent.alive())
        self.agents[agent.index] = ModelAgent(agent.index)

    def lose_coordinator(self) -> None:
        self.story.append("the coordinator is another one")
        for agent in self.agents:
            agent.node = None
            agent.inbox.clear()
            agent.outbox.clear()
        self.coordinator = self._new_coordinator()

    def connect(self, agent: ModelAgent) -> None:
        if agent.node is None:
            node = self.coordinator.membership.admit(agent.index, NPROC, agent.inbox.append)
            self.story.append(f"node {agent.index} comes with {agent.ranks}")
            agent.connected(node)

    def deliver_one(self, agent: ModelAgent) -> None:
        if agent.node is not None and agent.outbox:
            message = agent.outbox.popleft()
            self.story.append(f"node {agent.index} -> {message}")
            self.coordinator.hear(agent.node, message)

    def deliver_to(self, agent: ModelAgent) -> None:
        if agent.inbox:
            command = agent.inbox.popleft()
            self.story.append(f"node {agent.index} <- {type(command).__name__} {getattr(command, 'rank', '')}")
            try:
                agent.obey(command)
            except AssertionError as error:
                self.fail(str(error))

    def deliver_all(self) -> None:
        while any(agent.node is not None and (agent.outbox or agent.inbox) for agent in self.agents):
            for agent in self.agents:
                self.deliver_one(agent)
                self.deliver_to(agent)

    def _new_coordinator(self) -> Coordinator:
        limits: dict[str, Any] = {"heartbeat_timeout_s": HEARTBEAT_S, "regroup_timeout_s": REGROUP_S}
        config = JobConfig(nproc_per_node=NPROC, nnodes=len(self.agents), **limits)
        say, events = (lambda line: self.story.append(f"  {line}")), EventLog(None)
        return Coordinator(config, events=events, say=say, clock=lambda: self.now_s)

    def fail(self, why: str) -> None:
        raise AssertionError("\n".join([*self.story[-120:], why]))


JOBS_PER_CASE = 100
CASES_PER_COMMIT = 3


@pytest.mark.parametrize(
    "first_seed",
    [
        pytest.param(case * JOBS_PER_CASE, marks=pytest.mark.long if case >= CASES_PER_COMMIT else ())
        for case in range(16)
    ],
)
def test_whatever_is_cut_the_job_goes_on_with_every_process_that_lives(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + JOBS_PER_CASE):
        job = CutJob(seed, nnodes=2 + seed % 3)
        for _ in range(job.random.randint(30, 400)):
            job.happen()
            assert job.coordinator.job.outcome is None, (seed, job.story[-60:])
        job.train()
        job.finish()
        assert sum(agent.healthy_ended for agent in job.agents) == 0, seed
