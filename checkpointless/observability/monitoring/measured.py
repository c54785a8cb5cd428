"""What the ranks of this node measured, from the lines that they and the node's agent append to the event log.

The ranks log each stage of a recovery with its duration anyway, so metrics cost neither a rank nor the agent's
loop anything. Messages on the ranks' sockets would wake the loop just while it recovers, and would be lost with a
rank that dies; a line that is written stays.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointless.faults.spec import FaultKind
from checkpointless.observability.monitoring.durations import Durations
from checkpointless.observability.monitoring.event_reader import MAX_BYTES, EventReader
from checkpointless.observability.telemetry.event_names import STAGES, EventName
from checkpointless.observability.telemetry.lines import LineTail

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

QUIET_S = 600.0  # an incident is over when its ranks were silent for so long
STAGE_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
#: ``detect`` is measured between processes, and only for a fault that was injected.
MEASURED_STAGES = (EventName.RESPAWN, *(stage for stage in STAGES if stage != EventName.DETECT))
OTHER = "other"
# In these stages the rank may not know the incident's name yet.
_WITHOUT_INCIDENT = frozenset({EventName.ABORT, EventName.FINALIZE, EventName.HEALTH})
# These stages are logged with the generation that ended, the others with the next one.
_OF_THE_ENDED = frozenset({EventName.RESPAWN, EventName.NOTIFY, EventName.BARRIER, *_WITHOUT_INCIDENT})
_OWNER = re.compile(rb'"node":(-?\d{1,9}),"rank":(null|\d{1,9}),')
_OWNER_WITHIN = 256  # bytes from the start of a line


@dataclass(frozen=True)
class Measured:
    """What was read from the event log so far.

    Attributes:
        stages: durations of each stage; each incident counts with the rank of this node that took longest.
        transfer_bytes: how many bytes the ranks of this node received from living replicas.
        faults: number of faults injected into the ranks of this node, by kind; unknown kinds count as ``other``.
        inexact: number of generations in which a rank of this node found that a step is another one since it was
            made again.
    """

    stages: Mapping[str, Durations]
    transfer_bytes: int
    faults: Mapping[str, int]
    inexact: int = 0


class Measuring(EventReader):
    """Reads an event log on behalf of a node while somebody asks for its contents.

    Args:
        path: path of the log; what it already contains was written for another agent, and is left out.
        node: the agent's own number in the log.
        ranks: returns the ranks of this node, and whether the job is over. A spare has no ranks until it takes a
            place.

    Attributes:
        measured: the newest result; it is replaced, never changed.
    """

    def __init__(self, path: Path, node: int, ranks: Callable[[], tuple[frozenset[int], bool]]) -> None:
        super().__init__("measured")
        self._tail = LineTail(path, max_bytes=MAX_BYTES)
        self._node, self._ranks = node, ranks
        self._tally = MeasuredTally()
        self.measured = self._tally.measured()

    def ask(self) -> Measured:
        """Return at once what is known, and keep it up to date for a while."""
        self.asked()
        return self.measured

    def look(self, now_s: float) -> None:
        """Read the lines that were appended.

        Args:
            now_s: the current time on the monotonic clock.
        """
        ranks, over = self._ranks()
        self._tally.take(self._tail.lines(), self._node, ranks, now_s)
        self._tally.close(ranks, now_s, over=over)
        self.measured = self._tally.measured()


@dataclass
class _Incident:
    """What the ranks of this node have logged about an incident so far.

    Attributes:
        spent: seconds by stage and rank; several spans of a rank add up.
        running: spans that have begun and not ended, by rank and stage.
        resumed: ranks that have made their first step after the incident.
        heard_at_s: when the last line about the incident was read.
    """

    spent: dict[str, Counter[int | None]] = field(default_factory=dict)
    running: set[tuple[int | None, str]] = field(default_factory=set)
    resumed: set[int | None] = field(default_factory=set)
    heard_at_s: float = 0.0


class MeasuredTally:
    """Counts lines of the event log.

    An incident is identified by the generation that it ended, because a rank begins to clean up before it is told
    the incident's name. The stages of an incident are counted once: when all ranks of the node have made a step
    again, another incident followed, the job is over, or nothing more was heard of it.
    """

    def __init__(self) -> None:
        self._stages: dict[str, Durations] = dict.fromkeys(MEASURED_STAGES, Durations.none(STAGE_BUCKETS_S))
        self._transfer_bytes = 0
        self._faults = Counter({kind.value: 0 for kind in FaultKind})
        self._inexact: set[int] = set()
        self._open: dict[int, _Incident] = {}
        self._counted = -2  # the newest generation whose end was counted; -1 is before the first

    def measured(self) -> Measured:
        """Return what was counted so far."""
        return Measured(dict(self._stages), self._transfer_bytes, dict(self._faults), len(self._inexact))

    def take(self, lines: Iterable[bytes], node: int, ranks: frozenset[int], now_s: float) -> None:
        """Count what these lines say about a node.

        Args:
            lines: lines from any nodes, without newlines; a line that is not an event is skipped.
            node: number of the node's agent.
            ranks: the node's ranks, which belong to its agent's place in the job, not to the agent's number.
            now_s: the current time on the monotonic clock.
        """
        for line in lines:
            owner = _OWNER.search(line[:_OWNER_WITHIN])
            if owner is None:
                continue
            number, rank = owner.groups()
            if int(number) != node if rank == b"null" else int(rank) not in ranks:
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                logger.debug("%r is no event: %s", line[:_OWNER_WITHIN], error)
                continue
            if isinstance(record, dict):
                self._take(record, now_s)

    def close(self, ranks: frozenset[int], now_s: float, *, over: bool = False) -> None:
        """Count the incidents about which nothing more will come.

        Args:
            ranks: the node's ranks.
            now_s: the current time on the monotonic clock.
            over: whether the job is over.
        """
        newest = max(self._open, default=0)
        for ended, incident in sorted(self._open.items()):
            resumed = bool(ranks) and ranks <= incident.resumed
            silent = not incident.running and now_s - incident.heard_at_s > QUIET_S
            if over or resumed or silent or ended < newest:
                for stage, spent in incident.spent.items():
                    self._stages[stage] = self._stages[stage].and_one_of(max(spent.values()))
                self._counted = max(self._counted, ended)
                del self._open[ended]

    def _take(self, record: Mapping[str, Any], now_s: float) -> None:
        stage, generation, rank = record.get("stage"), record.get("generation"), record.get("rank")
        if stage == EventName.FAULT_INJECTED:
            kind = str(record.get("spec")).partition("@")[0].partition(":")[0]
            self._faults[kind if kind in self._faults else OTHER] += 1
        if not isinstance(stage, str) or not isinstance(generation, int) or not isinstance(rank, int | None):
            return
        if stage == EventName.INEXACT:
            self._inexact.add(generation)
        if stage not in self._stages:
            return
        if record.get("incident") is None and stage not in _WITHOUT_INCIDENT:
            return  # this is the start of the job
        ended = generation if stage in _OF_THE_ENDED else generation - 1
        if ended <= self._counted:
            return
        incident = self._open.setdefault(ended, _Incident())
        incident.heard_at_s = now_s
        if record.get("edge") == "begin":
            if stage == EventName.RESPAWN:  # the spans of the dead process will not end
                incident.running = {(who, what) for who, what in incident.running if who != rank}
            incident.running.add((rank, stage))
        elif record.get("edge") == "end":
            incident.running.discard((rank, stage))
            if "error" not in record:
                self._took(incident, stage, rank, record)

    def _took(self, incident: _Incident, stage: str, rank: int | None, record: Mapping[str, Any]) -> None:
        seconds, nbytes = record.get("seconds"), record.get("bytes")
        if isinstance(seconds, int | float) and 0 <= seconds < math.inf:
            incident.spent.setdefault(stage, Counter())[rank] += seconds  # type: ignore[assignment]
        if stage == EventName.TRANSFER and isinstance(nbytes, int) and nbytes > 0:
            self._transfer_bytes += nbytes
        if stage == EventName.FIRST_STEP:
            incident.resumed.add(rank)
