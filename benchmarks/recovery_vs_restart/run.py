"""A fault survived in memory, against a restart from a checkpoint of every step:
`python benchmarks/recovery_vs_restart/run.py --json results.json`.
"""

from __future__ import annotations

import json
import shutil
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
    search_path,
    shown,
    spread,
    wait_for,
)

HERE = Path(__file__).resolve().parent
NPROC = 4
STEPS = 10
FAULTS = {"exception": "exception@backward:rank=2,step=6", "killed": "sigkill@backward:rank=2,step=6"}
SIDES = ("checkpointless", "checkpoint")
PRELOAD = (
    "nemo.collections.llm,nemo.lightning,checkpointless.strategies,checkpointless.callbacks,checkpointless.testing.demo.text,"
    "checkpointless.recipes.runner"
)
LIMIT_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """One fault.

    Attributes:
        recovery_s: fault to the end, on the last rank, of the first step that no rank had completed before.
        repeated: how many steps were made again that every rank had completed before the fault.
        step_s: median time from the end of a step to the end of the next, before the fault; on the checkpoint side
            a checkpoint lies between.
    """

    side: str
    fault: str
    recovery_s: float
    repeated: int
    step_s: float


def job(side: str, fault: str, directory: Path) -> Job:
    """The processes of one side."""
    arguments = [str(HERE / "train.py"), side, str(directory), str(STEPS), FAULTS[fault]]
    environment = {"PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1", "CHECKPOINTLESS_CPU": "1"}
    if side == "checkpointless":
        command = [sys.executable, "-m", "checkpointless", "run", "--cpu", "--nproc-per-node", str(NPROC)]
        command += ["--run-dir", str(directory / "run"), "--preload", PRELOAD]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NPROC)]
        # With torchrun's default, the agent's store, no restart works: gloo finds the dead ranks' addresses.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command += ["--max-restarts", "3", "--monitor-interval", "0.1", "--standalone"]
    return Job([[*command, *arguments]], [environment], directory / "output.log")


def measure(side: str, fault: str, directory: Path) -> Outcome:
    """Train through one fault."""
    directory.mkdir(parents=True)
    with job(side, fault, directory) as running:
        if not wait_for(lambda: running.ended, LIMIT_S):
            raise RuntimeError(f"the {side} job did not end in {LIMIT_S:g} s; see {directory / 'output.log'}")
        if running.exit_codes() != [0]:
            raise RuntimeError(f"the {side} job failed; see {directory / 'output.log'}")
    return judge(side, fault, read_marks(directory))


def judge(side: str, fault: str, marks: list[Mark]) -> Outcome:
    """What a run's marks say."""
    at_s = next(mark.at_s for mark in marks if mark.what == "fault")
    before: dict[int, list[float]] = defaultdict(list)
    after: dict[int, list[float]] = defaultdict(list)
    for mark in marks:
        if mark.what == "step":
            (before if mark.at_s < at_s else after)[mark.detail["step"]].append(mark.at_s)
    next_step = max(before) + 1
    missing = [step for step in range(next_step, STEPS + 1) if len(after[step]) != NPROC]
    if missing:
        raise RuntimeError(f"steps {missing} were not made by every rank after the {side} side's {fault}")
    ends = [max(ranks) for step, ranks in sorted(before.items()) if step > 1]  # the first one is like no other
    return Outcome(
        side=side,
        fault=fault,
        recovery_s=max(after[next_step]) - at_s,
        repeated=sum(1 for step, ranks in before.items() if len(ranks) == NPROC and after.get(step)),
        step_s=statistics.median(later - earlier for earlier, later in pairwise(ends)),
    )


def main() -> None:
    """Run all cases, alternating between the sides, and show the table."""
    options = parser((__doc__ or "").partition(":")[0])
    options.add_argument("--side", choices=SIDES, help="only this side")
    options.add_argument("--fault", choices=list(FAULTS), help="only this fault")
    args = options.parse_args()
    about = machine(["torch", "lightning", "nemo_toolkit", "megatron-core", "checkpointless"])
    outcomes: list[Outcome] = []
    with interruptible(), ExitStack() as stack:
        base = stack.enter_context(folder_of_runs(args.keep, "recovery-"))
        for repeat, fault, side in product(range(args.repeats), FAULTS, SIDES):
            if args.side not in (None, side) or args.fault not in (None, fault):
                continue
            directory = (base / f"{fault}-{side}-{repeat}").resolve()
            shutil.rmtree(directory, ignore_errors=True)
            outcome = measure(side, fault, directory)
            outcomes.append(outcome)
            progress(
                f"{repeat + 1}/{args.repeats} {fault}: {side} {outcome.recovery_s:.2f} s, "
                f"{outcome.repeated} steps repeated, {outcome.step_s:.2f} s a step"
            )
    _report(outcomes, about, args.json)


def _report(outcomes: list[Outcome], about: dict[str, Any], path: Path | None) -> None:
    print("\n| fault | side | fault to the next new step, s | steps repeated | undisturbed step, s |")
    print("| --- | --- | --- | --- | --- |")
    summary: list[dict[str, Any]] = []
    for fault in FAULTS:
        medians = {}
        for side in SIDES:
            group = [each for each in outcomes if (each.fault, each.side) == (fault, side)]
            if not group:
                continue
            recovery, steps = [each.recovery_s for each in group], [each.step_s for each in group]
            repeated = [each.repeated for each in group]
            medians[side] = statistics.median(recovery)
            print(f"| {fault} | {side} | {shown(recovery)} | {min(repeated)} to {max(repeated)} | {shown(steps)} |")
            entry = {"fault": fault, "side": side, "recovery_s": spread(recovery), "repeated": spread(repeated)}
            summary.append({**entry, "step_s": spread(steps)})
        if len(medians) == len(SIDES):
            print(
                f"| {fault} | ratio of the medians | {medians['checkpoint'] / medians['checkpointless']:.1f} | | |"
            )
    if path is not None:
        results = {"machine": about, "summary": summary, "runs": [asdict(each) for each in outcomes]}
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
