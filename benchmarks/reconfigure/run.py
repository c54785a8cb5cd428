"""The next default group after a fault, over gloo: made anew as checkpointless does, or reconfigured by torch.

`python benchmarks/reconfigure/run.py --json results.json`, with torch 2.14 or newer.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist

from benchmarks.common import interruptible, machine, progress
from benchmarks.reconfigure.rank import WAYS, Round, Timing, serve
from checkpointless.launcher.agent.node import _GenerationStore

ANSWER_S = 90.0


class Fault(Enum):
    """What happened to the ranks, while all but rank 0 wait in a collective."""

    ALIVE = "all ranks alive"
    KILLED = "one killed and replaced"


@dataclass(frozen=True)
class Recovery:
    """A new group, of the slowest rank each.

    Attributes:
        freed_ms: until the main thread had left the collective.
        total_ms: until the first collective of the new group was done.
        cpu_ms: time of the processor, the mean of the ranks that lived through the fault.
    """

    freed_ms: float
    total_ms: float
    cpu_ms: float


class Ranks:
    """Processes that go from group to group in one way.

    Args:
        way: its name.
        count: how many there are.
    """

    def __init__(self, way: str, count: int) -> None:
        self._way, self._count, self._number = way, count, 0
        self._stores = _GenerationStore(0), _GenerationStore(0)
        self._of_group: _GenerationStore | None = None
        self._all = [self._started(rank) for rank in range(count)]
        self._hear("ready")
        self.recover(None)

    def recover(self, fault: Fault | None) -> Recovery:
        """Let a fault happen, and wait for the new group.

        Args:
            fault: None for the first group.
        """
        self._number += 1
        fresh = _GenerationStore(self._number)
        told = Round(self._number, fresh.port)
        self._say(told)
        self._hear("blocked")
        if fault is Fault.KILLED:
            rank = self._number % (self._count - 1) + 1
            process, _ = self._all[rank]
            process.kill()
            process.join()
            self._all[rank] = self._started(rank)
            for word, answer in ((None, "ready"), (told, "blocked")):
                if word is not None:
                    self._all[rank][1].send(word)
                assert _heard(self._all[rank]) == answer
        self._say("recover")
        timings: list[Timing] = [_heard(each) for each in self._all]
        self._of_group = fresh  # the one before is closed
        cpu_s = [each.cpu_s for each in timings if not each.is_new] or [0.0]
        slowest = max(each.freed_s for each in timings), max(each.total_s for each in timings)
        return Recovery(1e3 * slowest[0], 1e3 * slowest[1], 1e3 * statistics.mean(cpu_s))

    def end(self) -> None:
        """End all processes."""
        self._say(None)
        for process, _ in self._all:
            process.join(5)
            process.kill()

    def _started(self, rank: int) -> tuple[Any, Any]:
        here, there = multiprocessing.Pipe()
        ports = self._stores[0].port, self._stores[1].port
        process = multiprocessing.Process(
            target=serve, args=(self._way, rank, self._count, ports, there), daemon=True
        )
        process.start()
        return process, here

    def _say(self, word: object) -> None:
        for _, pipe in self._all:
            pipe.send(word)

    def _hear(self, word: str) -> None:
        for each in self._all:
            assert _heard(each) == word


def _heard(rank: tuple[Any, Any]) -> Any:
    """Return what a rank says, within a bound."""
    process, pipe = rank
    if not pipe.poll(ANSWER_S):
        raise SystemExit(f"process {process.pid} of a rank has said nothing for {ANSWER_S:g} s")
    return pipe.recv()


def measure(count: int, rounds: int) -> list[dict[str, Any]]:
    """Let both ways recover in turns, and return every recovery.

    Args:
        count: the number of ranks.
        rounds: how often each kind of fault happens in each way.
    """
    sides = {way: Ranks(way, count) for way in WAYS}
    found = []
    for number in range(rounds + 1):
        for fault in Fault:
            for way in list(sides) if number % 2 else reversed(sides):
                recovery = sides[way].recover(fault)
                if number:  # the first is left out
                    found.append({"ranks": count, "fault": fault.value, "way": way, **asdict(recovery)})
    for side in sides.values():
        side.end()
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return medians as a table of Markdown."""
    lines = ["| ranks | fault | way | freed, ms | whole, ms | longest, ms | CPU per rank, ms |", "|" + " --- |" * 7]
    for kind in dict.fromkeys((each["ranks"], each["fault"], each["way"]) for each in found):
        rows = [each for each in found if (each["ranks"], each["fault"], each["way"]) == kind]
        freed, whole, cpu = (
            statistics.median(row[key] for row in rows) for key in ("freed_ms", "total_ms", "cpu_ms")
        )
        longest = max(row["total_ms"] for row in rows)
        lines.append(f"| {' | '.join(map(str, kind))} | {freed:.0f} | {whole:.0f} | {longest:.0f} | {cpu:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="how many ranks (default: 4 8)")
    parser.add_argument("--rounds", type=int, default=15, help="faults of each kind in each way (default: 15)")
    parser.add_argument("--json", type=Path, help="where to write every recovery")
    options = parser.parse_args()
    if not hasattr(dist, "_reconfigure"):
        raise SystemExit("this torch cannot reconfigure a group: it needs 2.14 or newer")
    multiprocessing.set_start_method("fork")
    facts, found, began_s = machine(["torch"]), [], time.monotonic()
    for count in options.ranks:
        progress(f"{count} ranks")
        found += measure(count, options.rounds)
    print(table(found), f"\n{time.monotonic() - began_s:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": facts, "recoveries": found}, indent=1) + "\n")


if __name__ == "__main__":
    with interruptible():
        main()
