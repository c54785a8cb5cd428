"""Many processes write one event log, and some of them die while they do."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog, read_events
from tests.waiting import wait_until

pytestmark = pytest.mark.ranks

_WRITER = """
import sys, threading
from pathlib import Path
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog
from checkpointless.observability.telemetry.scribe import scribe
rank, count = int(sys.argv[2]), int(sys.argv[3])
log = EventLog(Path(sys.argv[1]) / EVENTS_FILE, rank=rank)

def write(thread):
    n = 0
    while count < 0 or n < count:
        log.emit(EventName.DATA, "point", generation=0, thread=thread, n=n, filler="x" * (n * 37 % 3000))
        n += 1
        if n % 100 == 0:  # a log whose disk is slower than its writer drops lines, and counts them
            scribe.flush()

threads = [threading.Thread(target=write, args=(thread,)) for thread in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def writer(run_dir: Path, rank: int, count: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", _WRITER, str(run_dir), str(rank), str(count)])


def test_no_line_is_lost_or_mixed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writers = [writer(tmp_path, rank, 300) for rank in range(6)]
    assert [process.wait(timeout=180) for process in writers] == [0] * 6
    seen = Counter((event.rank, event.fields["thread"], event.fields["n"]) for event in read_events(tmp_path))
    assert seen == Counter((rank, thread, n) for rank in range(6) for thread in range(2) for n in range(300))
    assert not caplog.records


def test_a_killed_writer_costs_the_others_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    victim, other = writer(tmp_path, 0, -1), writer(tmp_path, 1, 300)
    wait_until(lambda: any(event.rank == 0 for event in read_events(tmp_path)))
    os.kill(victim.pid, signal.SIGKILL)
    assert victim.wait(timeout=180) == -signal.SIGKILL
    assert other.wait(timeout=180) == 0
    EventLog(tmp_path / EVENTS_FILE, rank=2).emit(EventName.DATA, "point", generation=1)
    events = read_events(tmp_path)
    assert sum(event.rank == 1 for event in events) == 600
    assert events[-1].rank == 2
    assert not [event for event in events if event.stage == EventName.EVENTS_DROPPED]
    for thread in range(2):
        numbers = [event.fields["n"] for event in events if event.rank == 0 and event.fields["thread"] == thread]
        assert numbers == list(range(len(numbers)))
    assert not caplog.records
