"""Time loads and saves of ``torch_dist`` checkpoints by Megatron's strategies and by ours, in one run."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ranks.nemo_zygote import Zygote

RANKS = 4
SIDES = "benchmarks.dist_checkpoint.sides"


def main() -> None:
    """Run the benchmark, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("loads", "saves"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    zygote, root = Zygote(), Path(tempfile.mkdtemp(prefix="dist-checkpoint-"))
    results: dict[str, object] = {"load_average": load_before}
    try:
        for what in ("loads", "saves"):
            if arguments.only in (None, what):
                given = {"root": str(root), "repeats": arguments.repeats}
                ranks = zygote.run(RANKS, f"{SIDES}:measure_{what}", given, limit_s=540.0)
                results[what] = ranks
                _print(what, ranks)
    finally:
        zygote.close()
        shutil.rmtree(root, ignore_errors=True)
    print(f"load average before: {load_before:.1f}, after: {os.getloadavg()[0]:.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


def _print(what: str, ranks: list[dict[str, list[list[float]]]]) -> None:
    """Print, by side, the median over repeats of the slowest rank's seconds, and the second figure of all ranks."""
    second = "MB read, all ranks" if what == "loads" else "s until it is whole"
    print(f"| {what[:-1]} | s: median (range) | {second} |\n| --- | --- | --- |")
    for side in ranks[0]:
        times = [max(rank[side][repeat][0] for rank in ranks) for repeat in range(len(ranks[0][side]))]
        others = [[rank[side][repeat][1] for rank in ranks] for repeat in range(len(ranks[0][side]))]
        rest = (
            f"{sum(others[0]) / 1e6:.0f}"
            if what == "loads"
            else f"{statistics.median(max(each) for each in others):.2f}"
        )
        print(f"| {side} | {statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f}) | {rest} |")


if __name__ == "__main__":
    main()
