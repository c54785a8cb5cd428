"""What checkpointless costs per step when nothing happens: `python benchmarks/hooks/run.py --json results.json`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Job, folder_of_runs, interruptible, machine, progress, search_path, wait_for
from benchmarks.hooks.hook_timer import PART_OF, SEPARATOR, Part
from checkpointless.recipes.settings import RECIPE_PRELOAD, RECIPE_RUNNER

HERE = Path(__file__).resolve().parent
RECIPE = "tiny_gpt_cpu"
# How many ranks, and what is changed in the recipe.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "4-ranks": (4, ()),
    "4-ranks-dropout": (4, ("model.config.hidden_dropout=0.1", "model.config.attention_dropout=0.1")),
    "4-ranks-copied": (4, ("checkpointless.rng_replication_jump=2",)),
    "2-ranks": (2, ()),
}
# What the design allows: of the parts that are work of this rank's own.
OWN = (Part.STREAMS, Part.STATE, Part.REST)
SUM = "all that is this rank's own: the streams, the state and the rest"
LIMIT_US = 100.0
LIMIT_SHARE = 1e-3
LONG_STEP_US = 1e6
SKIPPED = 10
TIMEOUT_S = 280.0


@dataclass
class Step:
    """One step of one rank, in microseconds.

    Attributes:
        whole: from the beginning of the step to that of the next.
        parts: what checkpointless added.
        spent: the same, by the path of calls.
    """

    rank: int
    whole: float
    parts: dict[Part, float] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)

    def sum(self, parts: Sequence[Part]) -> float:
        """What ``parts`` add up to."""
        return sum(self.parts[part] for part in parts)


@dataclass
class Outcome:
    """One job.

    Attributes:
        afterwards: what to compare with, timed by all ranks when training was over, in microseconds.
    """

    case: str
    steps: list[Step]
    afterwards: dict[str, list[float]]


def job(case: str, steps: int, directory: Path, by_call: bool) -> Job:
    """The processes of one case."""
    nproc, overrides = CASES[case]
    command = [sys.executable, "-m", "checkpointless", "run", "--cpu", "--nproc-per-node", str(nproc)]
    command += ["--run-dir", str(directory / "run"), "--preload", ",".join(RECIPE_PRELOAD), "-m", RECIPE_RUNNER]
    timer = json.dumps({"_target_": "hook_timer.HookTimer", "directory": str(directory), "by_call": by_call})
    command += [RECIPE, f"trainer.max_steps={SKIPPED + steps + 1}", f"callbacks.timer={timer}", *overrides]
    environment = {"PYTHONPATH": search_path(HERE), "OMP_NUM_THREADS": "1"}
    return Job([command], [environment], directory / "output.log")


def measure(case: str, steps: int, directory: Path, by_call: bool) -> Outcome:
    """Train, and read what the ranks wrote down.

    Raises:
        RuntimeError: the job failed, or a rank wrote down fewer steps.
    """
    directory.mkdir(parents=True)
    nproc = CASES[case][0]
    with job(case, steps, directory, by_call) as running:
        if not wait_for(lambda: running.ended, TIMEOUT_S):
            raise RuntimeError(f"the job did not end in {TIMEOUT_S:g} s; see {directory / 'output.log'}")
        if running.exit_codes() != [0]:
            raise RuntimeError(f"the job failed; see {directory / 'output.log'}")
    ranks = [json.loads((directory / f"hooks-{rank}.json").read_text()) for rank in range(nproc)]
    made = [_step(each["rank"], step) for each in ranks for step in each["steps"][SKIPPED:]]
    if len(made) != nproc * steps:
        raise RuntimeError(f"{len(made)} steps were timed, not {nproc} x {steps}; see {directory}")
    afterwards: dict[str, list[float]] = defaultdict(list)
    for each in ranks:
        for name, taken in each["at_once"].items():
            afterwards[name] += [ns / 1e3 for ns in taken]
    return Outcome(case, made, dict(afterwards))


def _step(rank: int, read: dict[str, Any]) -> Step:
    step = Step(rank, read["whole"] / 1e3, dict.fromkeys(Part, 0.0))
    for path, ns in read["spent"].items():
        part = PART_OF[path.rpartition(SEPARATOR)[2]]
        if part is not None:
            step.parts[part] += ns / 1e3
            step.spent[path] = ns / 1e3
    return step


def main() -> None:
    """Run the cases one after the other, and show the tables."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--steps", type=int, default=100, metavar="N", help="timed, of each rank (default: 100)")
    options.add_argument("--case", choices=list(CASES), action="append", help="only this case; may be repeated")
    options.add_argument("--by-call", action="store_true", help="time each call by itself, too, which takes longer")
    options.add_argument("--json", type=Path, metavar="FILE", help="where the results go (default: only shown)")
    options.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs' logs and times here")
    args = options.parse_args()
    if args.steps < 2:
        options.error(f"--steps {args.steps}: at least 2")
    about = machine(["torch", "lightning", "nemo_toolkit", "megatron-core", "checkpointless"])
    outcomes: list[Outcome] = []
    with interruptible(), ExitStack() as stack:
        base = stack.enter_context(folder_of_runs(args.keep, "hooks-"))
        for number, case in enumerate(args.case or CASES):
            directory = (base / str(number)).resolve()
            shutil.rmtree(directory, ignore_errors=True)
            progress(f"{case}: {args.steps} steps")
            outcomes.append(measure(case, args.steps, directory, args.by_call))
    about["load_at_end"] = os.getloadavg()[0]
    _report(outcomes, about, args.json)


def _report(outcomes: list[Outcome], about: dict[str, Any], path: Path | None) -> None:
    summary = [_summary(outcome) for outcome in outcomes]
    show(summary)
    print(f"\n{about['date']}, {about['cpu']}, {about['cores']} cores, load {about['load_at_end']:.0f} at the end")
    if path is not None:
        runs = [_by_rank(outcome) for outcome in outcomes]
        results = {"machine": about, "summary": summary, "runs": runs}
        path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def show(summary: Sequence[dict[str, Any]]) -> None:
    """The tables, by part and by call, and a sentence per case."""
    heads = " | ".join(entry["case"] for entry in summary)
    print(f"\n| µs: median (p90); of this step; of a step of 1 s | {heads} |")
    print("| --- |" + " --- |" * len(summary))
    for name in summary[0]["us"]:
        figures = [entry["us"][name] for entry in summary]
        cells = [
            f"{_us(each['median'])} ({_us(each['p90'])}); {each['percent_of_step']:.2f} %; "
            f"{100 * each['median'] / LONG_STEP_US:.3f} %"
            for each in figures
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print(f"\n| call, without the calls in it that have a line: median of µs | {heads} |")
    print("| --- |" + " --- |" * len(summary))
    for path in {path: None for entry in summary for path in entry["calls_us"]}:
        cells = [_us(entry["calls_us"][path]) if path in entry["calls_us"] else "-" for entry in summary]
        print(f"| {path} | " + " | ".join(cells) + " |")
    print()
    for entry in summary:
        print(f"{entry['case']}: {entry['verdict']}")


def _summary(outcome: Outcome) -> dict[str, Any]:
    steps = outcome.steps
    step_us = statistics.median(step.whole for step in steps)
    apart = any(step.parts[Part.STREAMS] for step in steps)  # not without --by-call
    parts = [part for part in Part if apart or part not in OWN]
    figures = {part.value: _figures([step.parts[part] for step in steps], steps) for part in parts}
    figures[SUM] = own = _figures([step.sum(OWN) for step in steps], steps)
    with_copy = (*OWN, Part.REPLICATION)
    figures["the same with what goes to another rank"] = _figures([step.sum(with_copy) for step in steps], steps)
    for name, values in outcome.afterwards.items():
        figures[f"to compare: {name}"] = {
            **_median_p90(values),
            "percent_of_step": 100 * statistics.median(values) / step_us,
        }
    figures["the whole step"] = _figures([step.whole for step in steps], steps)
    spent: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for path, us in step.spent.items():
            if PART_OF[path.rpartition(SEPARATOR)[2]] is not Part.WAITS:
                spent[_without_training(path)].append(us)
    kept, in_share = own["median"] < LIMIT_US, own["percent_of_step"] < 100 * LIMIT_SHARE
    verdict = (
        f"the hooks take {_us(own['median'])} µs, the limit of {LIMIT_US:g} µs is "
        f"{'kept' if kept else 'BROKEN'}; {own['percent_of_step']:.2f} % of this step of {step_us / 1e3:.0f} ms, "
        f"the limit of {100 * LIMIT_SHARE:g} % is {'kept' if in_share else 'BROKEN'} here, and kept by every step "
        f"longer than {own['median'] / LIMIT_SHARE / 1e3:.0f} ms"
    )
    return {
        "case": outcome.case,
        "us": figures,
        "calls_us": {path: statistics.median(values) for path, values in spent.items()},
        "verdict": verdict,
    }


def _by_rank(outcome: Outcome) -> dict[str, Any]:
    """All steps of a case, in order, by rank."""
    ranks: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step in outcome.steps:
        for part, us in step.parts.items():
            ranks[step.rank][part.name.lower()].append(round(us, 1))
        ranks[step.rank]["whole"].append(round(step.whole, 1))
    # One text per list: a line per number would be ten thousand lines.
    shown = {rank: {name: " ".join(map(str, us)) for name, us in parts.items()} for rank, parts in ranks.items()}
    return {"case": outcome.case, "us_by_rank": shown}


def _figures(values: Sequence[float], steps: Sequence[Step]) -> dict[str, float]:
    shares = [100 * value / step.whole for value, step in zip(values, steps)]
    return {**_median_p90(values), "percent_of_step": statistics.median(shares)}


def _median_p90(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p90": statistics.quantiles(values, n=10)[-1]}


def _without_training(path: str) -> str:
    """The path without the calls that belong to the training."""
    return SEPARATOR.join(name for name in path.split(SEPARATOR) if PART_OF[name] is not None)


def _us(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
