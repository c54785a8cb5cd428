"""How fast one rank is filled: against a raw gloo send, and against torchft's transports.

    python benchmarks/transfer/run.py --repeats 5 --json benchmarks/transfer/results.json

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import ROOT, TARGETS, install_beside, machine, progress, search_path, spread

HERE = Path(__file__).resolve().parent
TORCHFT_VERSION = "0.2.0"
TORCHFT_TARGET = TARGETS / f"torchft-{TORCHFT_VERSION}"
SIDES = ("raw", "ours_1", "ours_2", "torchft_http", "torchft_pg")
LABELS = {
    "raw": "gloo, raw, 256 MiB a send",
    "ours_1": "checkpointless, one holder",
    "ours_2": "checkpointless, two holders",
    "torchft_http": "torchft HTTPTransport, 10 chunks",
    "torchft_pg": "torchft PGTransport, in place",
}


def measure(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Run three ranks and return what rank 0 measured, one entry per transfer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "sides.py"), json.dumps(settings)],
            env={
                **os.environ,
                "PYTHONPATH": search_path(TORCHFT_TARGET),
                "RANK": str(rank),
                "WORLD_SIZE": "3",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            cwd=ROOT,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(3)
    ]
    found = []
    try:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            entry = json.loads(line)
            found.append(entry)
            progress(f"{entry['repeat'] + 1}/{settings['repeats']} {entry['side']}: {entry['gb_per_s']:.2f} GB/s")
        for rank in ranks:
            if rank.wait(60) != 0:
                raise RuntimeError("a rank failed; what it said stands above")
    finally:
        for rank in ranks:
            rank.kill()
    return found


def table(entries: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    speeds = {
        side: spread([entry["gb_per_s"] for entry in entries if entry["side"] == side])
        for side in SIDES
        if any(entry["side"] == side for entry in entries)
    }
    lines = [
        "| side | GB/s: median (range) | of raw | processor seconds | extra memory, filled rank / holder, MiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for side, speed in speeds.items():
        of_raw = f"{speed['median'] / speeds['raw']['median']:.0%}" if "raw" in speeds else ""
        extras = [entry["extra_bytes"] for entry in entries if entry["side"] == side]
        used_s = spread([sum(entry["processor_s"]) for entry in entries if entry["side"] == side])["median"]
        peaks = [max(extra[rank] for extra in extras) / 2**20 for rank in (0, 1)]
        lines.append(
            f"| {LABELS[side]} | {speed['median']:.2f} ({speed['min']:.2f} to {speed['max']:.2f}) | {of_raw} "
            f"| {used_s:.2f} | {peaks[0]:.0f} / {peaks[1]:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--small", type=int, default=2000, help="tensors of 256 KiB (default: 2000)")
    parser.add_argument("--large", type=int, default=15, help="tensors of 100 MiB (default: 15)")
    parser.add_argument("--memory-budget-mib", type=int, default=128, help="of a transfer (default: 128)")
    parser.add_argument("--sides", default=",".join(SIDES), help="which, in this order (default: all)")
    parser.add_argument("--json", type=Path, help="write every transfer to this file")
    options = parser.parse_args()
    sides = options.sides.split(",")
    if any(side.startswith("torchft") for side in sides):
        install_beside(TORCHFT_TARGET, f"torchft=={TORCHFT_VERSION}")
    settings = {
        "repeats": options.repeats,
        "small": options.small,
        "large": options.large,
        "memory_budget_bytes": options.memory_budget_mib * 2**20,
        "sides": sides,
    }
    about = machine(["torch"])
    entries = measure(settings)
    print(table(entries))
    if options.json is not None:
        results = {"machine": about, "settings": settings, "transfers": entries}
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
