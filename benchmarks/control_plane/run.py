"""What coordinating costs, by the number of ranks: `python benchmarks/control_plane/run.py --json results.json`."""

from __future__ import annotations

import argparse
import functools
import gc
import random
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import interruptible, machine, progress, spread
from benchmarks.control_plane.measurement import Case, Measurement, report
from checkpointless.launcher.coordinator import coordinator as measured
from checkpointless.launcher.coordinator.coordinator import Coordinator
from checkpointless.launcher.coordinator.hosting import TICK_S
from checkpointless.launcher.coordinator.job import Node
from checkpointless.launcher.coordinator.job_config import JobConfig
from checkpointless.launcher.protocol.causes import Cause, CauseKind
from checkpointless.launcher.protocol.channel import Channel
from checkpointless.launcher.protocol.messages import (
    FROM_COORDINATOR,
    FROM_NODE,
    Answer,
    Barrier,
    FaultNotice,
    FaultReport,
    Go,
    Inquire,
    Joined,
    Kill,
    LineBuffer,
    NodeMessage,
    OpenStore,
    Progress,
    RankEnded,
    RankStanding,
    RankState,
    Silent,
    SilentRank,
    Spawn,
    Standing,
    StoreOpened,
    encode,
)
from checkpointless.observability.telemetry.events import EventLog

RANKS = (64, 1_024, 16_384)
NPROC = 8
STAYS_S = 3600.0  # longer than any rank has to leave its block
HEARTBEAT_S = 60.0
PROGRESS_PER_S = 4
STEADY_S = 1.0  # of the job's time
LOST, SIGKILL = 1, -9  # the node that is lost; how a process ends
TRACEBACK = "".join(
    f'  File "/srv/train/model.py", line {n}, in layer_{n}\n    x = self.layer(x)\n' for n in range(20)
)
LOG = [f"line {number} of the rank's log, as long as such lines are, more or less" for number in range(10)]


class SimulatedNode:
    """A node whose ranks do at once what they are told.

    Attributes:
        wire: the commands that were sent to it and that it has not read.
        lines: what its connection with the coordinator uses.
        incarnations: of its ranks' processes.
        said: its messages that the coordinator has not read.
        place: what the coordinator knows it by.
    """

    def __init__(self) -> None:
        self.wire: deque[bytes] = deque()
        self.said: deque[bytes] = deque()
        self.lines = LineBuffer()
        self.place: Node
        self.incarnations: dict[int, int] = {}

    def say(self, *messages: Any) -> None:
        """Tell the coordinator."""
        self.said.extend(map(encode, messages))

    def ready(self, rank: int, step: int) -> None:
        """A rank is at the barrier."""
        self.say(Barrier(0, rank=rank, incarnation=self.incarnations[rank], committed=step, making=step + 1))


class World:
    """A job: the real coordinator, simulated nodes, and a clock that runs only while the coordinator works.

    Args:
        ranks: how many.
        seed: of the order in which the nodes are heard.
    """

    def __init__(self, ranks: int, seed: int) -> None:
        self.ranks = ranks
        self.step = 100
        self.measurement = Measurement("", ranks)
        self.coordinator = self._new_coordinator()
        self.nodes = [SimulatedNode() for _ in range(ranks // NPROC)]
        self.spare = SimulatedNode()
        self._random = random.Random(seed)
        self._clock_s = 0.0  # the coordinator's, without what the nodes take
        self._working_since_s = 0.0
        self._last: dict[type, float] = {}  # by kind of command, when the last of it was sent
        self._victims: set[int] = set()  # ranks that report a broken collective before they leave
        self._not_leaving: set[int] = set()  # ranks that cannot be told

    # ---- the coordinator's side

    def _new_coordinator(self) -> Coordinator:
        return Coordinator(
            JobConfig(
                nproc_per_node=NPROC,
                nnodes=self.ranks // NPROC,
                heartbeat_timeout_s=HEARTBEAT_S,
                regroup_timeout_s=HEARTBEAT_S,
            ),
            events=EventLog(None),
            say=lambda line: None,
        )

    @contextmanager
    def _working(self) -> Iterator[None]:
        cpu_s, self._working_since_s = time.thread_time(), time.perf_counter()
        yield
        self._clock_s += time.perf_counter() - self._working_since_s
        self.measurement.cpu_s += time.thread_time() - cpu_s

    def _send(self, node: SimulatedNode, command: Any) -> None:
        """As a channel does, up to the socket."""
        line = encode(command)
        node.wire.append(line)
        self._last[type(command)] = self._clock_s + time.perf_counter() - self._working_since_s
        self.measurement.sent += 1
        self.measurement.sent_bytes += len(line)
        self.measurement.count(command)

    def _hear_all(self) -> None:
        """Hear everything that the nodes have said, node after node."""
        nodes = [node for node in (*self.nodes, self.spare) if node.said]
        self._random.shuffle(nodes)
        heard = self.measurement
        for node in nodes:
            data, count = b"".join(node.said), len(node.said)
            node.said.clear()
            heard.heard += count
            heard.heard_bytes += len(data)
            with self._working():
                for line in node.lines.feed(data):
                    message = cast(NodeMessage, FROM_NODE.decode(line))  # it knows no others
                    heard.count(message)
                    self.coordinator.hear(node.place, message)

    # ---- the nodes' side

    def _obey_all(self) -> None:
        """Every node reads its commands and answers."""
        for node in (*self.nodes, self.spare):
            while node.wire:
                self._obey(node, FROM_COORDINATOR.decode(node.wire.popleft()))

    def _obey(self, node: SimulatedNode, command: Any) -> None:
        if isinstance(command, OpenStore):
            node.say(StoreOpened(command.generation, "10.0.0.1", 29501))
        elif isinstance(command, Spawn):
            node.incarnations[command.rank] = command.incarnation
            node.ready(command.rank, -1)
        elif isinstance(command, FaultNotice):
            for rank in sorted(set(node.incarnations) - self._not_leaving):
                if rank in self._victims:
                    node.say(self._trouble(rank, CauseKind.VICTIM, "DistBackendError", "Connection closed by peer"))
                node.ready(rank, self.step)
        elif isinstance(command, Kill):
            node.say(self._death(command.rank, forgiven=True))
        elif isinstance(command, Inquire):
            for rank in command.ranks:
                node.say(Answer(command.id, rank != self.culprit, TRACEBACK, rank=rank))

    def _trouble(self, rank: int, kind: CauseKind, error: str, message: str) -> FaultReport:
        return FaultReport(
            generation=self.coordinator.job.generation,
            cause=Cause(
                kind, rank, "exception", f"raised {error}", self.step + 1, message, error, message, TRACEBACK
            ),
            committed=self.step,
            making=self.step + 1,
        )

    def _death(self, rank: int, *, forgiven: bool = False) -> RankEnded:
        return RankEnded(
            rank=rank,
            incarnation=self.nodes[rank // NPROC].incarnations[rank],
            code=SIGKILL,
            forgiven=forgiven,
            committed=self.step,
            making=self.step + 1,
            log_path=f"/run/rank-{rank}.log",
            last_lines=LOG,
        )

    # ---- what happens

    @property
    def culprit(self) -> int:
        """The rank that something happens to: one in the middle."""
        return self.ranks // 2 + 3

    def run(self, case: Case) -> Measurement:
        """Let it happen.

        Raises:
            RuntimeError: it did not come to what it must come to.
        """
        gc.collect()
        self.measurement = Measurement(case.value, self.ranks)
        self._last = {}
        self._victims, self._not_leaving = set(), set()
        began_s, generation = self._clock_s, self.coordinator.job.generation
        node = self.nodes[self.culprit // NPROC]
        if case is Case.START:
            self._start()
        elif case is Case.STEADY:
            self._train()
        elif case in (Case.RAISES, Case.STORM):
            if case is Case.STORM:
                self._victims = set(range(self.ranks)) - {self.culprit}
            node.say(self._trouble(self.culprit, CauseKind.EXCEPTION, "ValueError", "a bug"))
        elif case is Case.DIES:
            self._not_leaving = {self.culprit}
            node.say(self._death(self.culprit))
        elif case is Case.HANGS:
            self._hang()
        elif case is Case.NODE:
            self._lose_node()
        elif case is Case.TAKEOVER:
            self._take_over()
        self._settle()
        if case is Case.HANGS:  # who hangs does not leave its block, and is killed when its time is up
            with self._working():
                self.coordinator.tick(time.monotonic() + STAYS_S)
            self._settle()
        self._check(case, generation)
        if FaultNotice in self._last:
            self.measurement.told_s = self._last[FaultNotice] - began_s
        if Go in self._last:
            self.measurement.regrouped_s = self._last[Go] - self._last.get(FaultNotice, began_s)
        done, self.measurement = self.measurement, Measurement("", self.ranks)
        self._train()  # so that the incident is over, and the next one comes after some progress
        return done

    def _settle(self) -> None:
        """Have all that is said heard and answered."""
        self._hear_all()
        self._obey_all()
        while any(each.said for each in (*self.nodes, self.spare)):
            self._hear_all()
            self._obey_all()

    def _start(self) -> None:
        for node in self._admit_all():
            node.say(Joined())
        self._hear_all()
        self._obey_all()

    def _admit_all(self) -> Iterator[SimulatedNode]:
        for index, node in enumerate([*self.nodes, self.spare]):
            number = index if index < len(self.nodes) else -1
            with self._working():
                node.place = self.coordinator.membership.admit(number, NPROC, functools.partial(self._send, node))
            yield node

    def _take_over(self) -> None:
        generation, self.coordinator = self.coordinator.job.generation, self._new_coordinator()
        for node in self._admit_all():
            ranks = [
                RankStanding(rank, incarnation, RankState.RUNNING, self.step, self.step + 1)
                for rank, incarnation in node.incarnations.items()
            ]
            node.say(Standing(generation, 5, self.step, "0123456789abcdef", False, ranks) if ranks else Joined())

    def _train(self) -> None:
        """The job trains for a while: every node tells of its progress, and the coordinator's clock ticks."""
        turns = int(STEADY_S * PROGRESS_PER_S)
        for _ in range(turns):
            self.step += 1
            for node in self.nodes:
                behind = self._random.randrange(2)
                node.say(Progress(self.step - 1 - behind, self.step - behind, self.step + 1, 900))
            self._hear_all()
            for _ in range(round(STEADY_S / TICK_S / turns)):
                with self._working():
                    self.coordinator.tick(time.monotonic())
        self.step += 1

    def _hang(self) -> None:
        """All ranks fall silent, are asked, and one does not wait in a collective."""
        self._not_leaving = {self.culprit}
        for index, node in enumerate(self.nodes):
            numbers = range(index * NPROC, (index + 1) * NPROC)
            silent_ms = int(HEARTBEAT_S * 1000) + 10
            rows = [SilentRank(number, 7, silent_ms, silent_ms, self.step + 1, True, 0, 0) for number in numbers]
            node.say(Silent(rows))
        for _ in range(2):  # the inquiry and, when all have answered, the diagnosis
            self._hear_all()
            with self._working():
                self.coordinator.tick(time.monotonic())
            self._obey_all()

    def _lose_node(self) -> None:
        lost = self.nodes[LOST]
        self.nodes[LOST], self.spare = self.spare, SimulatedNode()
        lost.wire.clear()
        with self._working():
            self.coordinator.membership.lose(lost.place, "it closed the connection")

    def _check(self, case: Case, before: int) -> None:
        coordinator = self.coordinator
        by_type = self.measurement.by_type
        same = case in (Case.STEADY, Case.TAKEOVER)
        begins = 0 if same else len(self.nodes)
        interrupts = 0 if same or case is Case.START else len(self.nodes) - (case is Case.NODE)
        found = (
            coordinator.job.outcome,
            coordinator.job.generation - before,
            by_type.get("begin", 0),
            by_type.get("fault", 0),
        )
        if found != (None, int(not same), begins, interrupts):
            raise RuntimeError(f"{case.value}, {self.ranks} ranks: it came to {found}")


def over_a_socket(messages: int = 5_000) -> dict[str, float]:
    """Microseconds of processor time per message: by itself, and through a real channel with its system calls."""
    interrupt = FaultNotice(7, "8", "rank 9 raised ValueError at step 10: a bug", 9)
    selector = selectors.DefaultSelector()
    ours, theirs = socket.socketpair()
    heard: list[Any] = []
    channel = Channel(ours, selector, hears=FROM_NODE, on_message=heard.append, on_close=progress)
    line, taken = (
        encode(Barrier(0, rank=9, incarnation=0, committed=10, making=11)),
        dict.fromkeys(("encode", "send", "decode", "receive"), 0.0),
    )
    with theirs:
        for _ in range(messages):
            began_s = time.thread_time()
            encode(interrupt)
            encoded_s = time.thread_time()
            channel.send(interrupt)
            sent_s = time.thread_time()
            theirs.recv(4096)
            theirs.send(line)
            written_s = time.thread_time()
            FROM_NODE.decode(line)
            decoded_s = time.thread_time()
            for key, _ in selector.select():
                key.data()
            taken["encode"] += encoded_s - began_s
            taken["send"] += sent_s - encoded_s
            taken["decode"] += decoded_s - written_s
            taken["receive"] += time.thread_time() - decoded_s
    channel.close()
    selector.close()
    if len(heard) != messages:
        raise RuntimeError(f"{len(heard)} of {messages} messages came")
    return {name: 1e6 * seconds / messages for name, seconds in taken.items()}


def main() -> None:
    """Let everything happen at every size, the sizes in turn, and show the tables."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--repeats", type=int, default=5, metavar="N", help="per case and size (default: 5)")
    options.add_argument("--json", type=Path, metavar="FILE", help="where the results go (default: only shown)")
    options.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=RANKS,
        metavar="N",
        help=f"sizes of the job (default: {' '.join(map(str, RANKS))})",
    )
    options.add_argument(
        "--case", nargs="+", choices=[case.value for case in Case], metavar="CASE", help="only these, and the start"
    )
    args = options.parse_args()
    cases = [case for case in Case if args.case is None or case in (Case.START, *map(Case, args.case))]
    for ranks in args.ranks:
        if ranks < 2 * NPROC or ranks % NPROC:
            options.error(f"{ranks} ranks: at least {2 * NPROC}, and a multiple of {NPROC}")
    about = machine(["checkpointless"])
    progress(f"measuring {measured.__file__}")
    measurements: list[Measurement] = []
    sockets: list[dict[str, float]] = []
    with interruptible():
        for repeat in range(args.repeats):
            sockets.append(over_a_socket())
            for ranks in args.ranks:
                world = World(ranks, seed=repeat)
                measurements += [world.run(case) for case in cases]
                progress(f"repeat {repeat + 1}, {ranks:,} ranks")
    socket_us = {name: spread([each[name] for each in sockets]) for name in sockets[0]}
    report(measurements, socket_us, about, args.json)


if __name__ == "__main__":
    main()
