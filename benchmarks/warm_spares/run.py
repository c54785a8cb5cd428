"""What standbys bring when a rank is killed: `python benchmarks/warm_spares/run.py --json results.json`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import (
    Job,
    Mark,
    folder_of_runs,
    interruptible,
    machine,
    parser,
    progress,
    read_marks,
    search_path,
    shown,
    wait_for,
)
from checkpointless.cli.commands.train import preloads_of
from checkpointless.recipes.settings import load
from checkpointless.report.incidents import summarize
from checkpointless.telemetry.event_names import EventName
from checkpointless.telemetry.events import Event, read_events

HERE = Path(__file__).resolve().parent
RANKS = 2
PAUSE_S = 0.3  # between steps
MODES = ("forked", "interpreter")
SIDES = {"without": 0, "with a standby": 1}
START_LIMIT_S, LIMIT_S = 400.0, 300.0
RECIPE = "tiny_gpt_cpu"


@dataclass
class Outcome:
    """One job.

    Attributes:
        killed_s: from each SIGKILL to the end of the first step of the new process, in seconds.
        respawn_s: from the order to start it to the entry of its block, in seconds.
        used: how many of the new processes had been standbys.
        ready_s: how long each standby took until it waited, in seconds.
        standby_bytes: memory of a standby: private to it, and its share of all (PSS).
        rank_bytes: the same of a rank.
    """

    killed_s: list[float] = field(default_factory=list)
    respawn_s: list[float] = field(default_factory=list)
    used: int = 0
    ready_s: list[float] = field(default_factory=list)
    standby_bytes: list[tuple[int, int]] = field(default_factory=list)
    rank_bytes: list[tuple[int, int]] = field(default_factory=list)


def measure(mode: str, warm_spares: int, kills: int, directory: Path) -> Outcome:
    """Train, kill the last rank again and again, and read what was written down.

    Raises:
        RuntimeError: the job did not come so far.
    """
    directory.mkdir(parents=True)
    run_dir, log = directory / "run", directory / "log"
    found = Outcome()
    with Job([_command(mode, warm_spares, directory)], [_environment()], log) as running:
        if not wait_for(lambda: len(_steps(directory)) > 2 or running.ended, START_LIMIT_S) or running.ended:
            raise RuntimeError(f"the job does not train; see {log}")
        for kill in range(kills):
            if warm_spares and not wait_for(lambda count=kill: len(_ready(run_dir)) > count, LIMIT_S):
                raise RuntimeError(f"no standby is ready; see {log}")
            time.sleep(1)
            if warm_spares:
                found.standby_bytes.append(_memory(_ready(run_dir)[-1]))
            victim = _steps(directory)[-1].detail["pid"]
            found.rank_bytes.append(_memory(victim))
            at_s = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            if not wait_for(lambda pid=victim: _steps(directory)[-1].detail["pid"] != pid, LIMIT_S):
                raise RuntimeError(f"the rank does not come back; see {log}")
            new = _steps(directory)[-1].detail["pid"]
            found.killed_s.append(min(each.at_s for each in _steps(directory) if each.detail["pid"] == new) - at_s)
    events = read_events(run_dir)
    ends = [event for event in events if event.stage == EventName.RESPAWN and event.edge == "end"]
    found.respawn_s = [event.fields["seconds"] for event in ends]
    found.used = sum(event.fields["standby"] for event in ends)
    found.ready_s = [event.fields["seconds"] for event in _ready_events(run_dir)]
    if len(summarize(events)) != kills:
        raise RuntimeError(f"more happened than was caused; see {log}")
    return found


def _command(mode: str, warm_spares: int, directory: Path) -> list[str]:
    marks = json.dumps({"_target_": "step_marks.StepMarks", "directory": str(directory), "pause_s": PAUSE_S})
    command = [sys.executable, "-m", "checkpointless", "run", "--cpu", "--nproc-per-node", str(RANKS)]
    command += ["--run-dir", str(directory / "run"), "--warm-spares", str(warm_spares)]
    preload = [*preloads_of(load(RECIPE)), *(["sets_up_cuda"] if mode == "interpreter" else [])]
    command += ["--preload", ",".join(preload), "-m", "checkpointless.recipes.runner", RECIPE]
    return [*command, "trainer.max_steps=100000", f"callbacks.marks={marks}"]


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": search_path(HERE), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}


def _steps(directory: Path) -> list[Mark]:
    """The steps of the rank that is killed."""
    return [mark for mark in read_marks(directory) if mark.rank == RANKS - 1]


def _ready(run_dir: Path) -> list[int]:
    """The standbys that have been ready so far."""
    return [event.fields["process"] for event in _ready_events(run_dir)]


def _ready_events(run_dir: Path) -> list[Event]:
    events = [event for event in read_events(run_dir) if event.stage == EventName.STANDBY]
    return [event for event in events if event.fields["fate"] == "ready"]


def _memory(pid: int) -> tuple[int, int]:
    """Private bytes of a process, and its proportional share of all that it uses."""
    rows = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    sizes = {row[0]: int(row[1]) * 1024 for row in rows}
    return sizes["Private_Clean:"] + sizes["Private_Dirty:"], sizes["Pss:"]


def options() -> argparse.Namespace:
    """The command line."""
    made = parser((__doc__ or "").partition(":")[0])
    made.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="(default: all)")
    made.add_argument("--kills", type=int, nargs=2, default=[5, 2], metavar="N", help="per job, in each mode")
    return made.parse_args()


def main() -> None:
    """Run the sides of each mode by turns, and show the table."""
    args = options()
    json_file = args.json.resolve() if args.json is not None else None
    about = machine(["torch", "lightning", "nemo_toolkit", "megatron-core", "checkpointless"])
    found: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    with interruptible(), ExitStack() as stack:
        base = stack.enter_context(folder_of_runs(args.keep, "warm-spares-"))
        os.chdir(base)  # Python imports what lies in the current directory first
        for turn in range(args.repeats):
            for mode in args.modes:
                for side, warm_spares in SIDES.items():
                    place = base / f"{turn}-{mode}-{side}".replace(" ", "-")
                    outcome = measure(mode, warm_spares, args.kills[MODES.index(mode)], place)
                    found[mode, side].append(outcome)
                    progress(f"{turn + 1} of {args.repeats}: {mode}, {side}: {shown(outcome.killed_s)} s")
    about["load_at_end"] = os.getloadavg()[0]
    show(found, about)
    if json_file is not None:
        rows = [{"case": case, "runs": [asdict(each) for each in runs]} for case, runs in found.items()]
        json_file.write_text(json.dumps({"machine": about, "cases": rows}, indent=1) + "\n")


def show(found: dict[tuple[str, str], list[Outcome]], about: dict[str, Any]) -> None:
    """Print the tables."""
    print("| ranks | side | SIGKILL to the next step, s | start of the process to its block, s | by standbys |")
    print("| --- | --- | --- | --- | --- |")
    for (mode, side), runs in found.items():
        killed = [seconds for run in runs for seconds in run.killed_s]
        respawns = [seconds for run in runs for seconds in run.respawn_s]
        used = f"{sum(run.used for run in runs)} of {len(respawns)}"
        print(f"| {mode} | {side} | {shown(killed)} | {shown(respawns)} | {used} |")
    print("\n| ranks | | private, MB | share (PSS), MB | ready after, s |")
    print("| --- | --- | --- | --- | --- |")
    for mode, side in found:
        runs = found[mode, side]
        for who in ("standby", "rank"):
            sizes = [size for run in runs for size in getattr(run, f"{who}_bytes")]
            if sizes:
                private, share = (statistics.median(each) / 1e6 for each in zip(*sizes, strict=True))
                ready = shown([s for run in runs for s in run.ready_s]) if who == "standby" else "-"
                print(f"| {mode} | {who}, {side} | {private:.0f} | {share:.0f} | {ready} |")
    print(f"\n{about['date']}, {about['cpu']}, {about['cores']} cores, load {about['load_at_end']:.0f} at the end")


if __name__ == "__main__":
    main()
