"""An hour of incidents in a run as users have it: `python benchmarks/soak/users.py --minutes 60`.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import ROOT, folder_of_runs, interruptible, machine, progress, search_path
from benchmarks.soak.run import IN_PROCESS, KINDS, NPROC, SURVIVOR, Sampler, table
from checkpointless.faults.ledger import fired
from checkpointless.observability.report.incidents import IncidentSummary, Outcome, summarize
from checkpointless.observability.report.verify import compare
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import read_events
from checkpointless.observability.telemetry.steps import read_steps
from tests.ranks.users.end import compare_ends, read_ends
from tests.ranks.users.processes import replaced_healthy

SCRIPT = ROOT / "tests" / "ranks" / "users" / "train.py"
FEATURES = "ema,validation,modelckpt,monitored,callback-hooks,module-state,csv,workers"
STEP_S = 1.0  # of a step, of which most is waiting
INCIDENT_S = 5.0  # what one costs, on average of all kinds
GAP = 2  # steps at least between two of them
SAVE_EVERY, VALIDATE_EVERY = 20, 10
HEARTBEAT_S = 12.0  # Megatron-core's first checkpoint starts a process per rank that imports torch
_SHOWN = 12


@dataclass(frozen=True)
class Plan:
    """What is to be run.

    Attributes:
        steps: optimizer steps.
        faults: specs.
        features: of the script.
        heartbeat_s: the limit of a hang.
    """

    steps: int
    faults: tuple[str, ...]
    features: str
    heartbeat_s: float

    @classmethod
    def draw(cls, minutes: float, every_s: float, seed: int, features: str, heartbeat_s: float) -> Plan:
        """As many incidents as come in that time, at steps that the dice say.

        Args:
            minutes: how long the disturbed run takes, more or less.
            every_s: seconds from one incident to the next, on average.
            seed: of the dice.
            features: of the script.
            heartbeat_s: the limit of a hang.

        Raises:
            ValueError: the incidents come too fast to train between them.
        """
        gap = (every_s - INCIDENT_S) / STEP_S
        if gap < GAP:
            raise ValueError(f"--every must be at least {GAP * STEP_S + INCIDENT_S:.0f}, not {every_s:g}")
        dice = random.Random(f"soak/{seed}")
        step, faults = 2, []
        for index in range(max(1, round(minutes * 60 / every_s))):
            what = KINDS[index % len(KINDS)]
            rank = dice.choice(range(NPROC) if what.startswith(IN_PROCESS) else range(1, NPROC))
            faults.append(f"{what}:rank={rank},step={step}")
            step += GAP + round(dice.expovariate(1 / (gap - GAP))) if gap > GAP else GAP
        return cls(step + 2, tuple(faults), features, heartbeat_s)

    def command(self, run_dir: Path, pace_s: float) -> list[str]:
        """The command that runs it, with faults if it has a pace."""
        words = [sys.executable, "-m", "checkpointless", "run", "--cpu", "--nproc-per-node", str(NPROC)]
        words += ["--preload", "nemo.lightning,nemo.collections.llm,checkpointless.strategies"]
        words += ["--run-dir", str(run_dir), "--record-steps"]
        if pace_s:
            words += ["--heartbeat-timeout", str(self.heartbeat_s)]
            words += [word for fault in self.faults for word in ("--fault", fault)]
        words += [str(SCRIPT), "--steps", str(self.steps), "--features", self.features, "--pace", str(pace_s)]
        return [*words, "--save-every", str(SAVE_EVERY), "--validate-every", str(VALIDATE_EVERY)]


def run(plan: Plan, run_dir: Path, temporary: Path, pace_s: float) -> Sampler:
    """Run the job to its end.

    Raises:
        RuntimeError: it failed.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.parent / f"{run_dir.name}-agent.log"
    with log.open("wb") as file:
        agent = subprocess.Popen(
            plan.command(run_dir, pace_s),
            env={**os.environ, "PYTHONPATH": search_path(), "TMPDIR": str(temporary)},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    sampler = Sampler(agent, temporary)
    sampler.start()
    told_s = time.monotonic()
    try:
        while agent.poll() is None:
            time.sleep(1.0)
            if time.monotonic() - told_s > 60:
                told_s = time.monotonic()
                recorded = run_dir / "steps" / f"rank-{SURVIVOR}.jsonl"
                made = len(recorded.read_text().splitlines()) if recorded.exists() else 0
                progress(f"{run_dir.name}: {made} of {plan.steps} steps, {len(fired(run_dir))} faults")
    finally:
        agent.terminate()
        agent.wait()
    sampler.join(timeout=10)
    if agent.returncode != 0:
        raise RuntimeError(f"exit code {agent.returncode}; what it said: {log}; its logs: {run_dir}")
    return sampler


def held(run_dir: Path) -> dict[int, list[dict[str, float]]]:
    """What each rank held after each incident, in order, from the processes that lived through it."""
    found: dict[int, list[dict[str, float]]] = {}
    for event in read_events(run_dir):
        if event.stage == EventName.SETTLED and event.rank is not None:
            numbers = {name: float(event.fields[name]) for name in ("rss_bytes", "threads", "descriptors")}
            found.setdefault(event.rank, []).append({"pid": float(event.pid), **numbers})
    return found


def growth(values: Sequence[float]) -> float:
    """By how much a value grows from one incident to the next, over the second half (least squares)."""
    half = list(values[len(values) // 2 :])
    return statistics.linear_regression(range(len(half)), half).slope if len(half) > 1 else 0.0


def replaced(run_dir: Path) -> Counter[int]:
    """How often each rank got a new process."""
    events = read_events(run_dir)
    begun = (event for event in events if event.stage == EventName.RESPAWN and event.edge == "begin")
    return Counter(event.rank for event in begun if event.rank is not None)


def show(plan: Plan, run_dir: Path, calm_dir: Path, sampler: Sampler, incidents: list[IncidentSummary]) -> bool:
    """Print what came of it. Returns whether all is as it must be."""
    settled = held(run_dir)
    survivor = [{name: int(value) for name, value in each.items()} for each in settled.get(SURVIVOR, [])]
    if survivor:
        print("\n| what | first | last | most |\n| --- | --- | --- | --- |")
        for name, first, last, most in table(survivor, sampler.samples):
            print(f"| {name} | {first:,.1f} | {last:,.1f} | {most:,.1f} |")
    print("\n| rank | incidents lived through | processes | MB per incident | threads | descriptors |")
    print("| --- | --- | --- | --- | --- | --- |")
    started = replaced(run_dir)
    for rank, values in sorted(settled.items()):
        same = [each for each in values if each["pid"] == values[-1]["pid"]]
        slopes = [growth([each[name] for each in same]) for name in ("rss_bytes", "threads", "descriptors")]
        grown = f"{slopes[0] / 1e6:.3f} | {slopes[1]:.3f} | {slopes[2]:.3f}"
        print(f"| {rank} | {len(same)} | {1 + started[rank]} | {grown} |")
    endings = Counter(incident.outcome.value for incident in incidents)
    seconds = [each.headline_s for each in incidents if each.headline_s is not None]
    print(f"\n{len(incidents)} incidents of {len(plan.faults)} faults: {dict(endings)}")
    if seconds:
        print(f"median {statistics.median(seconds):.2f} s, most {max(seconds):.2f} s")
    healthy = replaced_healthy(run_dir, range(NPROC))
    print(f"healthy processes replaced: {', '.join(healthy) or 'none'}")
    different = [str(each) for each in compare_ends(read_ends(calm_dir, NPROC), read_ends(run_dir, NPROC))]
    verdict = compare(read_steps(calm_dir), read_steps(run_dir))
    print(f"the end, against the undisturbed run: {f'{len(different)} differences' if different else 'equal'}")
    for line in different[:_SHOWN]:
        print(f"* {line}")
    print(f"verify: {verdict.sentence}")
    missing = set(plan.faults) - set(fired(run_dir))
    for spec in sorted(missing):
        print(f"* fault {spec} did not happen")
    lost = any(incident.outcome is Outcome.FAILED for incident in incidents)
    return not (different or missing or healthy or lost or not verdict.equal)


def main() -> int:
    """Run both, and compare them."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--minutes", type=float, default=60.0, metavar="M", help="default: 60")
    options.add_argument("--every", type=float, default=15.0, metavar="S", help="seconds on average (default: 15)")
    options.add_argument("--seed", type=int, default=0, metavar="K", help="of the draws (default: 0)")
    options.add_argument("--features", default=FEATURES, help=f"of the script (default: {FEATURES})")
    options.add_argument("--heartbeat-timeout", type=float, default=HEARTBEAT_S, metavar="S", help="default: 12")
    options.add_argument("--run-dir", type=Path, metavar="D", help="keep both jobs' events and logs there")
    options.add_argument("--json", type=Path, metavar="FILE", help="where the samples go (default: only shown)")
    args = options.parse_args()
    try:
        plan = Plan.draw(args.minutes, args.every, args.seed, args.features, args.heartbeat_timeout)
    except ValueError as error:
        options.error(str(error))
    about = machine(["checkpointless", "torch", "nemo_toolkit", "megatron-core"])
    with interruptible(), folder_of_runs(None, "soak-") as folder:
        directory = (args.run_dir or folder).resolve()
        temporary = [folder / name for name in ("calm", "run")]
        for each in temporary:
            each.mkdir()
        progress(f"{plan.steps} steps with {len(plan.faults)} faults, and beside them the same without faults")
        began_s = time.monotonic()
        with ThreadPoolExecutor(1) as beside:  # the disturbed one mostly waits
            calm = beside.submit(run, plan, directory / "calm", temporary[0], 0.0)
            sampler = run(plan, directory / "run", temporary[1], STEP_S)
            minutes = (time.monotonic() - began_s) / 60
            calm.result()
        incidents = summarize(read_events(directory / "run"))
        where = f"{about['date']}, {about['cpu']}, {about['cores']} cores, commit {about['commit']}"
        print(f"\n{where}: {minutes:.1f} minutes")
        good = show(plan, directory / "run", directory / "calm", sampler, incidents)
        if args.json is not None:
            samples = [asdict(sample) for sample in sampler.samples]
            args.json.write_text(
                json.dumps({"machine": about, "held": held(directory / "run"), "samples": samples})
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
