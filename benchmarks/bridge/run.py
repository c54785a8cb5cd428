"""What checkpointless costs per step of Megatron-Bridge: `.venv-bridge/bin/python benchmarks/bridge/run.py`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Job, folder_of_runs, interruptible, machine, progress, wait_for

TRAIN = Path(__file__).resolve().with_name("train.py")
SKIPPED, RANKS, TIMEOUT_S = 10, 2, 280.0


def measure(directory: Path, steps: int, how: str) -> list[dict[str, float]]:
    """Train once, and return what each step of each rank took, in microseconds by name.

    Raises:
        RuntimeError: the job failed.
    """
    command = [sys.executable, "-m", "checkpointless", "run", "--cpu", "--nproc-per-node", str(RANKS)]
    command += ["--run-dir", str(directory / how), str(TRAIN), str(directory), str(steps + SKIPPED + 1), how]
    with Job([command], [{"OMP_NUM_THREADS": "1"}], directory / f"{how}.log") as job:
        if not wait_for(lambda: job.ended, TIMEOUT_S) or job.exit_codes() != [0]:
            raise RuntimeError(f"the job failed; see {(directory / f'{how}.log').read_text()[-2000:]}")
    made = []
    for rank in range(RANKS):
        for step in json.loads((directory / f"steps-{how}-{rank}.json").read_text())[SKIPPED:]:
            made.append({"whole": step["whole"] / 1e3, **{name: ns / 1e3 for name, ns in step["spent"].items()}})
    return made


def main() -> None:
    """Train with and without, one after the other, and show the table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--steps", type=int, default=200, metavar="N", help="timed, of each rank (default: 200)")
    options.add_argument("--json", type=Path, metavar="FILE", help="where the results go (default: only shown)")
    args = options.parse_args()
    results: dict[str, dict[str, float]] = {}
    with interruptible(), folder_of_runs(None, "bridge-") as folder:
        for how in ("without", "with"):
            progress(f"{how}: {args.steps} steps")
            made = measure(folder, args.steps, how)
            names = sorted({name for step in made for name in step})
            results[how] = {name: statistics.median(step.get(name, 0.0) for step in made) for name in names}
            if how == "with":
                sums = [sum(us for name, us in step.items() if name != "whole") for step in made]
                results[how]["hooks"] = statistics.median(sums)
    for how, values in results.items():
        print(how, {name: round(value, 1) for name, value in values.items()})
    if args.json is not None:
        about = machine(["torch", "megatron-core", "megatron-bridge", "checkpointless"])
        args.json.write_text(json.dumps({"machine": about, "median_us": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
