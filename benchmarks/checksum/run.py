"""How fast the digests are, against a copy of the same bytes, SHA-256 and CRC-32:
`python benchmarks/checksum/run.py --json results.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.common import interruptible, machine, progress, spread
from checkpointless.state.serialization.digest import MemoryChecksumManager, _digest_on_device
from checkpointless.state.serialization.tensor_memory import tensor_bytes

MIB = 1 << 20
SIZES_MIB = (1, 16, 128, 1024)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
COPY = "copy"
TENSORS = 16  # of a shard, for digest_all
# A turn of a side repeats its work until this much has gone through it: short times are those of the clock.
TURN_MIB = 64


@dataclass(frozen=True)
class Timing:
    """One side's turn with one tensor.

    Attributes:
        device: "cpu" or "cuda".
        gb_per_s: 10**9 bytes of the tensor, each counted once, per second.
    """

    device: str
    mib: int
    dtype: str
    side: str
    gb_per_s: float


def cpu_sides(tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What is done with the bytes of a tensor on the CPU, by name."""
    manager = MemoryChecksumManager()
    target = torch.zeros_like(tensor)
    shard = {("state", index): part for index, part in enumerate(tensor.chunk(TENSORS))}
    return {
        COPY: lambda: target.copy_(tensor),
        "digest_bytes": lambda: MemoryChecksumManager().digest(tensor),
        "digest_all": lambda: manager.digest_all(shard),
        "digest_on_device": lambda: _digest_on_device(tensor_bytes(tensor)).item(),
        "sha256": lambda: hashlib.sha256(tensor_bytes(tensor).numpy().data).digest(),
        "crc32": lambda: zlib.crc32(tensor_bytes(tensor).numpy().data),
    }


def cuda_sides(tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What is done with the bytes of a tensor on a GPU, by name."""
    manager = MemoryChecksumManager()
    target = torch.zeros_like(tensor)
    shard = {("state", index): part for index, part in enumerate(tensor.chunk(TENSORS))}
    return {
        COPY: lambda: target.copy_(tensor),
        "digest_on_device": lambda: _digest_on_device(tensor_bytes(tensor)).item(),
        "digest_all": lambda: manager.digest_all(shard),
        "to the host, digest_bytes": lambda: MemoryChecksumManager().digest(tensor.cpu()),
    }


def random_tensor(mib: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Of random bytes: no side is faster for zeros, and none shall be."""
    return torch.randint(-(2**63), 2**63 - 1, (mib * MIB // 8,), dtype=torch.int64).view(dtype).to(device)


def measure(work: Callable[[], Any], mib: int, device: str) -> float:
    """GB/s of one turn."""
    times = max(1, TURN_MIB // mib)
    _finish(device)
    began_s = time.perf_counter()
    for _ in range(times):
        work()
    _finish(device)
    return times * mib * MIB / (time.perf_counter() - began_s) / 1e9


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_all(device: str, args: argparse.Namespace) -> list[Timing]:
    """Every size and dtype on one device, the sides in turn."""
    timings = []
    for mib, name in product(args.mib, args.dtype):
        tensor = random_tensor(mib, DTYPES[name], device)
        sides = cuda_sides(tensor) if device == "cuda" else cpu_sides(tensor)
        for work in sides.values():
            work()  # the first time is for memory that was never touched
        for _, (side, work) in product(range(args.repeats), sides.items()):
            timings.append(Timing(device, mib, name, side, measure(work, mib, device)))
        progress(f"{device}, {mib:,} MiB, {name}: {len(sides)} sides, {args.repeats} turns each")
    return timings


def main() -> None:
    """Measure on the CPU, on a GPU if there is one, and show the tables."""
    options = argparse.ArgumentParser(
        description=(__doc__ or "").partition(":")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"""\
what is measured, GB/s of the same random bytes, the sides in turn:
  copy              Tensor.copy_ to another tensor: what the memory can do; every byte is read and written
  digest_bytes      what a bucket of a transfer is checked with: xxh3-64 on a CPU
  digest_all        what replicas are compared with before a recovery: xxh3-128 of {TENSORS} tensors on a CPU
  digest_on_device  what a tensor on a GPU is digested with; it runs on a CPU too, where nothing uses it
  sha256, crc32     of hashlib and zlib, for comparison

examples:
  python benchmarks/checksum/run.py --mib 16 --dtype bf16 --repeats 3    a quick look, seconds
  python benchmarks/checksum/run.py --json results.json                  everything, for the record
  python benchmarks/checksum/run.py --device cuda                        only what is there for a GPU
""",
    )
    options.add_argument("--repeats", type=int, default=7, metavar="N", help="turns of each side (default: 7)")
    options.add_argument("--json", type=Path, metavar="FILE", help="where the results go (default: only shown)")
    options.add_argument(
        "--mib", type=int, nargs="+", default=SIZES_MIB, metavar="N", help="sizes in MiB (default: 1 16 128 1024)"
    )
    options.add_argument(
        "--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="only these (default: all)"
    )
    options.add_argument("--threads", type=int, default=1, metavar="N", help="torch's on the CPU (default: 1)")
    options.add_argument("--device", choices=("cpu", "cuda"), help="only this one (default: what there is)")
    args = options.parse_args()
    if min(args.mib) < 1 or args.repeats < 1:
        options.error("--mib and --repeats are at least 1")
    devices = [device for device in ("cpu", "cuda") if args.device in (None, device)]
    if "cuda" in devices and not torch.cuda.is_available():
        print("no CUDA here: digest_on_device on a GPU, against a copy on it, is not measured")
        devices.remove("cuda")
    torch.set_num_threads(args.threads)
    about = {**machine(["torch", "xxhash", "checkpointless"]), "torch_threads": args.threads}
    if "cuda" in devices:
        about["gpu"] = torch.cuda.get_device_name()
    timings: list[Timing] = []
    with interruptible():
        for device in devices:
            timings += measure_all(device, args)
    _report(timings, about, args.json)


def _report(timings: Sequence[Timing], about: Mapping[str, Any], path: Path | None) -> None:
    groups: dict[tuple[str, int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for timing in timings:
        groups[timing.device, timing.mib, timing.side][timing.dtype].append(timing.gb_per_s)
    dtypes = list(dict.fromkeys(timing.dtype for timing in timings))
    heads = [
        "device",
        "MiB",
        "side",
        *(f"{dtype}, GB/s" for dtype in dtypes),
        *(f"{dtype} : copy" for dtype in dtypes),
    ]
    if groups:
        print("\n| " + " | ".join(heads) + " |")
        print("| " + " | ".join(["---"] * len(heads)) + " |")
    summary = []
    for (device, mib, side), by_dtype in groups.items():
        copies = groups[device, mib, COPY]
        ratios = {
            dtype: statistics.median(one / copy for one, copy in zip(by_dtype[dtype], copies[dtype]))
            for dtype in dtypes
        }
        cells = [f"{statistics.median(by_dtype[dtype]):.2f}" for dtype in dtypes]
        cells += [f"{ratios[dtype]:.2f}" for dtype in dtypes]
        print(f"| {device} | {mib:,} | {side} | " + " | ".join(cells) + " |")
        entry: dict[str, Any] = {"device": device, "mib": mib, "side": side, "of_copy": ratios}
        summary.append({**entry, "gb_per_s": {dtype: spread(found) for dtype, found in by_dtype.items()}})
    if path is not None:
        results = {"machine": about, "summary": summary, "runs": [asdict(each) for each in timings]}
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
