"""What a fill costs on a wire that runs ahead, counted without a GPU: waits of the host, launches, passes.

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

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.common import ROOT, machine, progress
from checkpointless.state.serialization.digest import BLOCK_LANES, CHUNK_LANES, _torch_digest, launch
from tests.unit.serialization import played_triton

HERE = Path(__file__).resolve().parent
GB = 1e9


class Traffic(TorchDispatchMode):
    """Counts the bytes of the tensors that torch's operations read and write; views are free.

    Attributes:
        nbytes: how many so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [each for each in tree_iter((args, kwargs, found)) if isinstance(each, torch.Tensor)]
            self.nbytes += sum(each.nbytes for each in tensors)
        return found


def passes(mib: int) -> dict[str, float]:
    """How often a digest reads or writes as many bytes as it digests, with torch's operations and in the kernel."""
    flat = torch.randint(0, 256, (mib << 20,), dtype=torch.uint8)
    expected = _torch_digest(flat, CHUNK_LANES)  # the weights are there from now on
    with Traffic() as traffic:
        _torch_digest(flat, CHUNK_LANES)
    read = 0
    load = played_triton.load

    def counting(pointer: Any, mask: Any, other: int) -> Any:
        nonlocal read
        read += int(mask.sum()) * pointer.memory.itemsize
        return load(pointer, mask, other)

    played_triton.load = counting
    try:
        total = launch(played_triton.played_kernel(), flat, CHUNK_LANES, BLOCK_LANES)
    finally:
        played_triton.load = load
    if int(total) != int(expected):
        raise RuntimeError("the kernel computes another digest")
    return {"torch's operations": traffic.nbytes / flat.nbytes, "the kernel": read / flat.nbytes}


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
    parser.add_argument("--mib", type=int, default=64, help="of the digests (default: 64)")
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
    for name, count in passes(options.mib).items():
        print(f"passes over memory of a digest of {options.mib} MiB, {name}: {count:.2f}")


if __name__ == "__main__":
    main()
