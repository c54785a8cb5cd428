"""What checkpointless costs per step of other trainers: `python benchmarks/hooks/trainers.py --json FILE`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Job, folder_of_runs, interruptible, machine, progress, search_path, wait_for
from benchmarks.hooks.trainer_timer import REST, STREAMS, VOTE, WAITS

HERE = Path(__file__).resolve().parent
RANKS = 4
CASES = (
    *("plain-ddp", "plain-hsdp", "lightning-ddp", "lightning-hsdp", "megatron"),
    # Lightning's DDP; its module keeps so much in plain attributes, a little changes in each step, or nothing
    *("lightning-1kb", "lightning-1mb", "lightning-1mb-still"),
)
PRELOAD = {
    "plain": "torch.distributed.fsdp",
    "lightning": "lightning.pytorch,checkpointless.strategies",
    "megatron": "checkpointless.integrations.megatron.training,megatron.core.models.gpt,megatron.core.optimizer",
}
SKIPPED = 10
TIMEOUT_S = 280.0
WALL, OWN_TIME = 0, 1
COLUMNS = (
    ("random streams", (STREAMS,)),
    ("the rest", (REST,)),
    ("both", (STREAMS, REST)),
    ("vote", (VOTE,)),
    ("waits for gloo in turns", (WAITS,)),
)


def measure(case: str, steps: int, directory: Path) -> list[dict[str, Any]]:
    """Train, and return the steps of all ranks: nanoseconds of the whole step and of each part, by either clock.

    Raises:
        RuntimeError: the job failed, or a rank wrote down fewer steps.
    """
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "checkpointless", "run", "--cpu", "--nproc-per-node", str(RANKS)]
    command += ["--run-dir", str(directory / "run"), "--preload", PRELOAD[case.partition("-")[0]]]
    command += [str(HERE / "trainer_rank.py"), case, str(directory), str(SKIPPED + steps + 1)]
    environment = {"PYTHONPATH": search_path(HERE), "OMP_NUM_THREADS": "1"}
    log = directory / "output.log"
    with Job([command], [environment], log) as running:
        if not wait_for(lambda: running.ended, TIMEOUT_S):
            raise RuntimeError(f"the job did not end in {TIMEOUT_S:g} s; see {log}")
        if running.exit_codes() != [0]:
            raise RuntimeError(f"the job failed; see {log}")
    made = []
    for rank in range(RANKS):
        read = json.loads((directory / f"hooks-{rank}.json").read_text())["steps"][SKIPPED : SKIPPED + steps]
        if len(read) != steps:
            raise RuntimeError(f"rank {rank} timed {len(read)} steps, not {steps}; see {directory}")
        made += read
    return made


def summary(case: str, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians and 90th percentiles in microseconds, by clock and column."""

    def figures(parts: Sequence[str], clock: int) -> dict[str, float]:
        taken = [sum(step["spent"].get(part, (0, 0))[clock] for part in parts) / 1e3 for step in steps]
        return {"median": statistics.median(taken), "p90": statistics.quantiles(taken, n=10)[-1]}

    entry: dict[str, Any] = {"case": case}
    for clock, name in ((WALL, "wall_us"), (OWN_TIME, "thread_us")):
        entry[name] = {column: figures(parts, clock) for column, parts in COLUMNS}
        whole = [step["whole"][clock] / 1e3 for step in steps]
        entry[name]["the whole step"] = {
            "median": statistics.median(whole),
            "p90": statistics.quantiles(whole, n=10)[-1],
        }
    return entry


def main() -> None:
    """Run the cases one after the other, and show the tables."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--steps", type=int, default=100, metavar="N", help="timed, of each rank (default: 100)")
    options.add_argument("--case", choices=CASES, action="append", help="only this case; may be repeated")
    options.add_argument("--json", type=Path, metavar="FILE", help="where the results go (default: only shown)")
    options.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs' logs and times here")
    args = options.parse_args()
    if args.steps < 2:
        options.error(f"--steps {args.steps}: at least 2")
    about = machine(["torch", "lightning", "megatron-core", "checkpointless"])
    entries: list[dict[str, Any]] = []
    with interruptible(), ExitStack() as stack:
        base = stack.enter_context(folder_of_runs(args.keep, "hooks-"))
        for case in args.case or CASES:
            directory = (base / case).resolve()
            shutil.rmtree(directory, ignore_errors=True)
            progress(f"{case}: {args.steps} steps, load {os.getloadavg()[0]:.0f}")
            entries.append(summary(case, measure(case, args.steps, directory)))
    about["load_at_end"] = os.getloadavg()[0]
    show(entries)
    print(f"\n{about['date']}, {about['cpu']}, {about['cores']} cores, commit {about['commit']}, load ", end="")
    print(f"{about['load_at_start']:.0f} at the start and {about['load_at_end']:.0f} at the end")
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": about, "summary": entries}, indent=1) + "\n")


def show(entries: Sequence[dict[str, Any]]) -> None:
    """Print the tables: the thread's own time, then the wall clock's."""
    for name, what in (("thread_us", "the thread's own time"), ("wall_us", "wall clock")):
        columns = list(entries[0][name])
        print(f"\n| µs a step, {what}: median (p90) | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
        for entry in entries:
            cells = [f"{entry[name][each]['median']:,.0f} ({entry[name][each]['p90']:,.0f})" for each in columns]
            print(f"| {entry['case']} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
