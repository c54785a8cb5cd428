"""What it brings to keep models built over a fault: `python benchmarks/warm/run.py --json results.json`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise, product
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
    shown,
    wait_for,
)
from checkpointless.observability.report.incidents import summarize
from checkpointless.observability.telemetry.events import read_events

HERE = Path(__file__).resolve().parent
RANKS = 4
#: A fault in every third step, an exception and a kill by turns, on one rank after the other but not on rank 0.
FAULTS = 6
FIRST_FAULT = 4  # the step
STEPS = 3 * FAULTS + 3
LAYOUTS = {
    "dp4": (),
    "tp2 dp2": ("strategy.tensor_model_parallel_size=2",),
    "pp2 dp2": ("strategy.pipeline_model_parallel_size=2",),
}
#: How many sequences of a step each rank has where their number varies: as many as with the recipe's four.
ROWS = 4
MODELS = {
    "tiny": (),
    "56 M": (
        "model.config.hidden_size=768",
        "model.config.ffn_hidden_size=3072",
        "model.config.num_layers=8",
        "model.config.num_attention_heads=12",
    ),
}
TIMEOUT_S = 900.0
#: From this size on, what is freed goes back to the kernel at once; else malloc keeps tensors of up to 32 MiB.
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


@dataclass(frozen=True)
class Outcome:
    """One job.

    Attributes:
        exception_s, killed_s: from each fault to the end of the step that it interrupted, in seconds.
        stages_s: how long each stage of the exceptions took, on the slowest rank: the median, in seconds.
        step_s: an undisturbed step, from the end of one to the end of the next: the median, in seconds.
        step_bytes: the most resident memory of a rank in its steps before the first fault, but the very first step.
        entry_bytes: the most resident memory of the same rank from a fault that its process lived through to its
            next step. Of all ranks it is the one in which this is most by comparison.
    """

    exception_s: list[float]
    killed_s: list[float]
    stages_s: dict[str, float]
    step_s: float
    step_bytes: int
    entry_bytes: int


def faults() -> list[str]:
    """The faults of a job."""
    kinds = ("exception", "sigkill")
    return [f"{kinds[at % 2]}@backward:rank={1 + at % 3},step={3 * at + FIRST_FAULT}" for at in range(FAULTS)]


def measure(python: str, overrides: list[str], directory: Path, ranks: int = RANKS) -> Outcome:
    """Train through the faults, and read what was written down.

    Args:
        python: the interpreter of the checkout.
        overrides: of the recipe.
        directory: a new directory for the job.
        ranks: how many there are.

    Raises:
        RuntimeError: the job failed.
    """
    directory.mkdir(parents=True)
    clock = json.dumps({"_target_": "rank_clock.RankClock", "directory": str(directory)})
    command = [
        python,
        "-m",
        "checkpointless",
        "train",
        "--cpu",
        "--nproc-per-node",
        str(ranks),
    ]
    command += ["--run-dir", str(directory / "run")]
    command += [text for fault in faults() for text in ("--fault", fault)]
    command += ["tiny_gpt_cpu", f"trainer.max_steps={STEPS}", f"callbacks.clock={clock}"]
    path = os.pathsep.join([str(HERE), str(HERE.parent)])  # of the checkout whose Python it is comes the rest
    with Job(
        [[*command, *overrides]], [{"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}], directory / "log"
    ) as running:
        if not wait_for(lambda: running.ended, TIMEOUT_S):
            raise RuntimeError(f"the job did not end in {TIMEOUT_S:g} s; see {directory / 'log'}")
        if running.exit_codes() != [0]:
            raise RuntimeError(f"the job failed; see {directory / 'log'}")
    return outcome(directory)


def outcome(directory: Path) -> Outcome:
    """Read what one job has written down."""
    incidents = summarize(read_events(directory / "run"))
    raised = [each for each in incidents if not each.respawned]
    stages: dict[str, list[float]] = defaultdict(list)
    for each in raised:
        for name, seconds in each.stages_s.items():
            stages[str(name)].append(seconds)
    marks = read_marks(directory)
    steps = [mark for mark in marks if mark.what == "step" and mark.rank == 0]  # which lives through everything
    calm = [(a, b) for a, b in pairwise(steps) if b.detail["step"] % 3 != 1]
    return Outcome(
        [each.headline_s for each in raised if each.headline_s is not None],
        [each.headline_s for each in incidents if each.respawned and each.headline_s is not None],
        {name: statistics.median(each) for name, each in stages.items()},
        statistics.median(b.at_s - a.at_s for a, b in calm),
        *max(memory(marks), key=lambda each: each[1] / each[0]),
    )


def memory(marks: list[Mark]) -> list[tuple[int, int]]:
    """Return ``step_bytes`` and ``entry_bytes`` of each rank that lived through a fault."""
    within: dict[int, int] = defaultdict(int)
    entries: dict[int, int] = defaultdict(int)
    begun: set[tuple[int, int]] = set()  # the processes of ranks that have made their first entry
    for mark in marks:
        process, peak = (mark.rank, mark.detail["pid"]), mark.detail["peak"]
        if mark.what == "step" and 1 < mark.detail["step"] < FIRST_FAULT:
            within[mark.rank] = max(within[mark.rank], peak)
        elif mark.what == "begun" and process in begun:
            entries[mark.rank] = max(entries[mark.rank], peak)
        elif mark.what == "begun":
            begun.add(process)
    return [(within[rank], most) for rank, most in entries.items()]


def options() -> argparse.Namespace:
    """The command line."""
    made = parser((__doc__ or "").partition(":")[0])
    made.add_argument("--before", metavar="PYTHON", help="also measure the checkout that this Python imports")
    made.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    made.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="(default: all)")
    made.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        metavar="N",
        help="instead: data-parallel jobs of N ranks, warm, each rank with the same share of a step",
    )
    made.add_argument(
        "--exact-memory",
        action="store_true",
        help="have malloc give back at once what is freed: the memory is what is held, and the times are longer",
    )
    return made.parse_args()


def cases(args: argparse.Namespace) -> list[tuple[tuple[str, str, str], str, list[str], int]]:
    """What is measured by turns: for each job its names, the interpreter, the overrides and the number of ranks."""
    if args.ranks:
        return [
            (("tiny", f"dp{ranks}", "warm"), sys.executable, [f"data.global_batch_size={ROWS * ranks}"], ranks)
            for ranks in args.ranks
        ]
    sides: dict[str, tuple[str, list[str]]] = {
        "warm": (sys.executable, []),
        "built anew": (sys.executable, ["checkpointless.warm=false"]),
    }
    if args.before:
        sides["before"] = (args.before, [])
    return [
        ((model, layout, side), python, [*MODELS[model], *LAYOUTS[layout], *more], RANKS)
        for model, layout, (side, (python, more)) in product(args.models, args.layouts, sides.items())
    ]


def main() -> None:
    """Run the sides of each case by turns, and show the table."""
    args = options()
    if args.exact_memory:
        os.environ.update(EXACT_MEMORY)  # of the jobs
    json_file = args.json.resolve() if args.json is not None else None
    about = machine(["torch", "lightning", "nemo_toolkit", "megatron-core", "checkpointless"])
    found: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    with interruptible(), ExitStack() as stack:
        base = stack.enter_context(folder_of_runs(args.keep, "warm-"))
        os.chdir(base)  # Python imports what lies in the current directory first
        for turn, (case, python, overrides, ranks) in product(range(args.repeats), cases(args)):
            progress(f"{turn + 1} of {args.repeats}: {', '.join(case)}")
            place = base / f"{turn}-{'-'.join(case)}".replace(" ", "-")
            found[case].append(measure(python, overrides, place, ranks))
    about["load_at_end"] = os.getloadavg()[0]
    show(found, about)
    if json_file is not None:
        rows = [{"case": case, "runs": [asdict(each) for each in runs]} for case, runs in found.items()]
        json_file.write_text(json.dumps({"machine": about, "cases": rows}, indent=1) + "\n")


def show(found: dict[tuple[str, str, str], list[Outcome]], about: dict[str, Any]) -> None:
    """Print the table."""
    print("| model | layout | side | exception, s | killed, s | step, s | memory at re-entry / in a step |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (model, layout, side), runs in found.items():
        raised = [seconds for run in runs for seconds in run.exception_s]
        killed = [seconds for run in runs for seconds in run.killed_s]
        step_s = statistics.median(run.step_s for run in runs)
        memory = max(run.entry_bytes / run.step_bytes for run in runs)
        print(f"| {model} | {layout} | {side} | {shown(raised)} | {shown(killed)} | {step_s:.2f} | {memory:.2f} |")
    print(f"\n{about['date']}, {about['cpu']}, {about['cores']} cores, load {about['load_at_end']:.0f} at the end")


if __name__ == "__main__":
    main()
