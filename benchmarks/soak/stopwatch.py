"""Does the report's account of time agree with a stopwatch? `python benchmarks/soak/stopwatch.py --minutes 60`.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import ROOT, folder_of_runs, interruptible, machine, progress, read_marks, search_path
from benchmarks.trainers.model import RANKS, STEP_S
from checkpointless.faults.ledger import FAULTS_DIR, fired
from checkpointless.observability.report.summary import build_report
from checkpointless.observability.telemetry.events import read_events

SCRIPT = ROOT / "benchmarks" / "trainers" / "checkpointless_side.py"
KINDS = (
    "exception@before_optimizer",
    "sigkill@optimizer",
    "exit@before_optimizer",
    "hang@before_optimizer",
    "exception@optimizer",
)
EVERY_STEPS, BEYOND_S = 120, 0.05  # from one fault to the next; what a step takes beside its sleep, about
AGREES = 0.02


def main() -> int:
    """Run a job with faults, and compare what its report says with what a clock says."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--minutes", type=float, default=60.0, metavar="M", help="about (default: 60)")
    options.add_argument("--seed", type=int, default=0, metavar="K", help="of the ranks (default: 0)")
    args = options.parse_args()
    dice, steps = random.Random(f"stopwatch/{args.seed}"), round(60 * args.minutes / (STEP_S + BEYOND_S))
    places = range(EVERY_STEPS, steps - 10, EVERY_STEPS)
    kinds = [KINDS[number % len(KINDS)] for number in range(len(places))]
    faults = [f"{kind}:rank={dice.randrange(RANKS)},step={at}" for kind, at in zip(kinds, places, strict=True)]
    about = machine(["torch", "checkpointless"])
    with interruptible(), folder_of_runs(None, "stopwatch-") as folder:
        run_dir = folder / "run"
        command = [sys.executable, "-m", "checkpointless", "run", "--nproc-per-node", str(RANKS)]
        command += ["--heartbeat-timeout", "10", "--run-dir", str(run_dir)]
        command += [word for fault in faults for word in ("--fault", fault)]
        progress(f"{steps} steps with {len(faults)} faults")
        clocks_s, began_s = time.time() - time.monotonic(), time.monotonic()
        with (folder / "output.log").open("wb") as log:
            environment = {**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [*command, str(SCRIPT), str(folder), str(steps), "none"],
                env=environment,
                stdout=log,
                stderr=log,
                check=False,
            )
        wall_s = time.monotonic() - began_s
        if done.returncode or len(fired(run_dir)) != len(faults):
            raise RuntimeError(f"exit code {done.returncode}, {len(fired(run_dir))} of {len(faults)} faults")
        fault_s = [path.stat().st_mtime - clocks_s for path in (run_dir / FAULTS_DIR).iterdir()]
        training_s, lost_s = seen(folder, sorted(fault_s))
        report = build_report(str(run_dir), read_events(run_dir))
    goodput = report.goodput
    if goodput is None or goodput.ettr is None:
        raise RuntimeError("the report does not know the goodput")
    pairs = {
        "wall clock": (goodput.wall_s, wall_s),
        "training, saves and stragglers": (goodput.ettr * goodput.wall_s, training_s),
        "incidents": (goodput.incidents_s, lost_s),
    }
    load = f"load {about['load_at_start']:.0f} to {os.getloadavg()[0]:.0f}"
    where = f"{about['date']}, {about['cpu']}, {about['cores']} cores, commit {about['commit']}, {load}"
    print(f"\n{where}: {len(report.incidents)} incidents")
    print("\n| seconds | report | stopwatch |\n| --- | --- | --- |")
    for name, (one, other) in pairs.items():
        print(f"| {name} | {one:.1f} | {other:.1f} |")
    print(f"| ETTR | {100 * goodput.ettr:.2f} % | {100 * training_s / wall_s:.2f} % |")
    print(f"goodput {100 * (goodput.ratio or 0.0):.2f} %: {dict(goodput.seconds)}")
    off = max(abs(one - other) for one, other in pairs.values()) / wall_s
    print(f"they differ by {100 * off:.2f} % of the wall clock at most")
    return int(off > AGREES)


def seen(directory: Path, fault_s: list[float]) -> tuple[float, float]:
    """Return the seconds of training and those of incidents, by when ranks had made steps and when faults came."""
    made: dict[int, list[float]] = defaultdict(list)
    for mark in read_marks(directory):
        if mark.what == "step":
            made[mark.detail["step"]].append(mark.at_s)
    all_s = sorted(max(times) for times in made.values() if len(times) >= RANKS)
    lost_s = reached_s = 0.0
    for at_s in fault_s:
        over_s = next(each for each in all_s if each > at_s)
        lost_s += over_s - max(at_s, reached_s)
        reached_s = over_s
    step_s = statistics.median(after - before for before, after in pairwise(all_s))
    return step_s + all_s[-1] - all_s[0] - lost_s, lost_s


if __name__ == "__main__":
    sys.exit(main())
