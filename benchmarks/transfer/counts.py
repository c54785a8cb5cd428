"""What a fill costs on a wire that runs ahead, counted without a GPU: waits of the host, and launches.

    python benchmarks/transfer/counts.py --before COMMIT

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import ROOT, machine, progress

HERE = Path(__file__).resolve().parent
GB = 1e9


def fill(settings: dict[str, Any], world: int, sources: Path) -> list[dict[str, Any]]:
    """What each rank counted in one fill, with the package that lies in ``sources``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "counted.py"), json.dumps(settings)],
            env={**os.environ, **shared, "RANK": str(rank), "PYTHONPATH": str(sources)},
            cwd=sources,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("a rank failed; what it said stands above")
    return [json.loads(each.splitlines()[-1]) for each in said]


def sources_of(commit: str, directory: Path) -> Path:
    """The package as it was at ``commit``."""
    archive = subprocess.run(
        ["git", "archive", commit, "checkpointless"], cwd=ROOT, check=True, capture_output=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(directory, filter="data")
    return directory


def table(entries: dict[str, list[dict[str, Any]]], nbytes: int) -> str:
    """The counts as Markdown."""
    lines = [
        "| sources | end | waits for digests | of control messages | waits per GB | launches | messages |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, ranks in entries.items():
        for each in ranks:
            end = "filled rank" if each["rank"] == 0 else f"holder {each['rank']}"
            waits = (each["digests"] + each["control"]) * GB / nbytes
            lines.append(
                f"| {name} | {end} | {each['digests']} | {each['control']} | {waits:.0f} "
                f"| {each['launches']} | {each['messages']} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=500, help="tensors of 256 KiB (default: 500)")
    parser.add_argument("--large-mib", type=int, default=900, help="size of the large tensor (default: 900)")
    parser.add_argument("--holders", type=int, default=2, help="how many fill the rank (default: 2)")
    parser.add_argument("--before", metavar="COMMIT", help="count with the sources of a commit before, too")
    options = parser.parse_args()
    settings = {"small": options.small, "small_bytes": 256 << 10, "large_bytes": options.large_mib << 20}
    nbytes = settings["small"] * settings["small_bytes"] + settings["large_bytes"]
    print(machine(["torch"]))
    entries = {}
    with tempfile.TemporaryDirectory() as directory:
        if options.before:
            sources = sources_of(options.before, Path(directory))
            entries["before"] = fill({**settings, "before": True}, options.holders + 1, sources)
        progress("the fills of now")
        entries["now"] = fill({**settings, "before": False}, options.holders + 1, ROOT)
    print(f"one fill of {nbytes / GB:.2f} GB\n\n{table(entries, nbytes)}\n")


if __name__ == "__main__":
    main()
