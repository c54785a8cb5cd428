"""What copies in tiers cost per step: `python benchmarks/tiers/run.py --json results.json`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Job, folder_of_runs, interruptible, machine, progress, search_path, wait_for
from checkpointless.recipes.settings import RECIPE_PRELOAD, RECIPE_RUNNER

HERE = Path(__file__).resolve().parent
RECIPE = "tiny_gpt_cpu"
RANKS = 4
# A model that is large for two cores, of which nothing is held twice.
MODEL = (
    "strategy.num_distributed_optimizer_instances=1",
    "model.config.hidden_size=256",
    "model.config.ffn_hidden_size=1024",
)
CASES = {
    "no tier": "{}",
    "neighbor memory, each step": "{neighbor_memory: {every: 1}}",
    "neighbor memory, each step, training waits": "{neighbor_memory: {every: 1, overlap: false}}",
    "neighbor memory, each 10 steps": "{neighbor_memory: {every: 10}}",
    "local directory, each 10 steps": "{local_directory: {path: COPIES, every: 10}}",
}
SKIPPED = 5
TIMEOUT_S = 280.0


@dataclass(frozen=True)
class Outcome:
    """One job.

    Attributes:
        steps_ms: how long each step of each rank took.
        part_bytes: what a copy of a rank's state takes.
        kept_bytes: what a rank keeps in memory, its own and its neighbors'.
        rss_bytes: the memory of the largest rank.
    """

    steps_ms: list[float]
    part_bytes: int
    kept_bytes: int
    rss_bytes: int


def measure(case: str, steps: int, directory: Path) -> Outcome:
    """Train, and read what the ranks wrote down.

    Raises:
        RuntimeError: the job failed.
    """
    directory.mkdir(parents=True)
    clock = json.dumps({"_target_": "step_clock.StepClock", "directory": str(directory)})
    tiers = CASES[case].replace("COPIES", str(directory / "copies"))
    command = [sys.executable, "-m", "checkpointless", "run", "--cpu", "--nproc-per-node", str(RANKS)]
    command += ["--run-dir", str(directory / "run"), "--preload", ",".join(RECIPE_PRELOAD), "-m", RECIPE_RUNNER]
    command += [RECIPE, f"trainer.max_steps={SKIPPED + steps + 1}", f"callbacks.clock={clock}", *MODEL]
    command += [f"checkpointless.tiers={tiers}"]
    environment = {"PYTHONPATH": search_path(HERE), "OMP_NUM_THREADS": "1"}
    with Job([command], [environment], directory / "output.log") as running:
        if not wait_for(lambda: running.ended, TIMEOUT_S):
            raise RuntimeError(f"the job did not end in {TIMEOUT_S:g} s; see {directory / 'output.log'}")
        if running.exit_codes() != [0]:
            raise RuntimeError(f"the job failed; see {directory / 'output.log'}")
    ranks = [json.loads((directory / f"clock-{rank}.json").read_text()) for rank in range(RANKS)]
    return Outcome(
        [ns / 1e6 for each in ranks for ns in each["steps_ns"][SKIPPED:]],
        max(each["part_bytes"] for each in ranks),
        max(each["kept_bytes"] for each in ranks),
        max(each["rss_bytes"] for each in ranks),
    )


def main() -> None:
    """Run the cases in turn, several times, and show the table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--steps", type=int, default=30, metavar="N", help="timed, of each rank (default: 30)")
    options.add_argument("--rounds", type=int, default=3, metavar="N", help="of all cases in turn (default: 3)")
    options.add_argument("--json", type=Path, metavar="FILE", help="where the results go (default: only shown)")
    args = options.parse_args()
    about = machine(["torch", "lightning", "nemo_toolkit", "megatron-core", "checkpointless"])
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    with interruptible(), ExitStack() as stack:
        base = stack.enter_context(folder_of_runs(None, "tiers-"))
        for turn in range(args.rounds):
            for number, case in enumerate(CASES):
                progress(f"round {turn + 1} of {args.rounds}: {case}")
                outcomes[case].append(measure(case, args.steps, base / f"{turn}-{number}"))
    about["load_at_end"] = os.getloadavg()[0]
    rows = [_row(case, outcomes[case], outcomes["no tier"]) for case in CASES]
    print("| tier | step, ms: median (p90) | to no tier | a copy, MB | kept, MB | rank's memory, MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['case']} | {row['median_ms']:.0f} ({row['p90_ms']:.0f}) | {row['ratio']:.2f} "
            f"| {row['part_bytes'] / 1e6:.1f} | {row['kept_bytes'] / 1e6:.1f} | {row['rss_bytes'] / 1e6:.0f} |"
        )
    print(f"\n{about['date']}, {about['cpu']}, {about['cores']} cores, load {about['load_at_end']:.0f} at the end")
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": about, "cases": rows}, indent=1) + "\n")


def _row(case: str, outcomes: list[Outcome], without: list[Outcome]) -> dict[str, Any]:
    steps = sorted(ms for each in outcomes for ms in each.steps_ms)
    ratios = [
        statistics.median(each.steps_ms) / statistics.median(other.steps_ms)
        for each, other in zip(outcomes, without, strict=True)
    ]
    return {
        "case": case,
        "median_ms": statistics.median(steps),
        "p90_ms": steps[int(0.9 * len(steps))],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "part_bytes": max(each.part_bytes for each in outcomes),
        "kept_bytes": max(each.kept_bytes for each in outcomes),
        "rss_bytes": max(each.rss_bytes for each in outcomes),
    }


if __name__ == "__main__":
    main()
