"""What a check of gradients costs: `python benchmarks/gradient_check/run.py --json results.json`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import interruptible, machine, progress

EVERY = (50, 10, 1)


def main() -> None:
    """Run a job in which every fourth step is checked, and compare the medians of its steps of either kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step; the last one is checked")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        script = str(Path(__file__).with_name("train.py"))
        arguments = [script, str(options.steps), "4", str(options.micro_batches), str(result)]
        launch = ["-m", "checkpointless", "run", "--nproc-per-node", str(options.nproc)]
        progress(f"{options.steps} steps on {options.nproc} ranks")
        subprocess.run([sys.executable, *launch, "--run-dir", f"{folder}/run", *arguments], check=True)
        times = json.loads(result.read_text())
    more = times["checked_s"] / times["plain_s"] - 1
    costs = {str(every): more / every for every in EVERY}
    print(f"a step takes {times['plain_s']:.4f} s, with a check {times['checked_s']:.4f} s")
    print("; ".join(f"sdc_check_every={every}: {100 * cost:.2f} %" for every, cost in costs.items()))
    if options.json is not None:
        figures = {"machine": machine(("torch",)), "steps": options.steps, "micro_batches": options.micro_batches}
        options.json.write_text(json.dumps({**figures, **times, "cost": costs}, indent=1) + "\n")


if __name__ == "__main__":
    with interruptible():
        main()
