"""Measure on one GPU what a recovery costs there: `python -m benchmarks.gpu.run --results build/gpu`.

See README.md beside this file. It is part 4 of `make gpu`, which says where results go.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu import results
from tests.gpu.isolated import IsolatedError, run_ranks
from tests.gpu.results import Figure, Outcome, Result

PART = "part4"
NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass(frozen=True)
class Measurement:
    """One function of figures.py.

    Attributes:
        name: of the function.
        limit_s: for its processes, in seconds.
        on_gpu: its arguments.
        on_cpu: its arguments where there is no CUDA; None: it is skipped there.
        ranks: how many processes.
        env: their further environment.
    """

    name: str
    limit_s: float
    on_gpu: dict[str, Any]
    on_cpu: dict[str, Any] | None = None
    ranks: int = 1
    env: dict[str, str] = field(default_factory=dict)


MEASUREMENTS = (
    Measurement("vote_cost", 60.0, {"times": 200}),
    Measurement("launches", 90.0, {"times": 3, "stall_s": 3.0}),
    Measurement(
        "digest", 60.0, {"mib": 1024, "times": 10, "device": "cuda"}, {"mib": 16, "times": 3, "device": "cpu"}
    ),
    Measurement("contexts", 90.0, {"times": 5}, env=NVML),
    Measurement(
        "reentry",
        90.0,
        {"parameters": 1_000_000_000, "times": 3, "device": "cuda"},
        {"parameters": 2_000_000, "times": 2, "device": "cpu"},
    ),
    Measurement("offload", 90.0, {"parameters": 1_000_000_000, "times": 3}),
    Measurement(
        "transfer",
        90.0,
        {"mib": 1024, "times": 5, "device": "cuda"},
        {"mib": 32, "times": 2, "device": "cpu"},
        ranks=2,
    ),
)


def measure(measurement: Measurement, has_cuda: bool) -> Result:
    """Measure, and return what was found, or why not."""
    arguments = measurement.on_gpu if has_cuda else measurement.on_cpu
    if arguments is None:
        return Result(PART, measurement.name, Outcome.SKIPPED, 0.0, "needs CUDA")
    began_s = time.monotonic()
    function = f"benchmarks.gpu.figures:{measurement.name}"
    try:
        found = run_ranks(function, measurement.ranks, measurement.limit_s, env=measurement.env, **arguments)
    except IsolatedError as error:
        return Result(PART, measurement.name, Outcome.FAILED, time.monotonic() - began_s, str(error))
    figures = tuple(
        Figure(each["name"], each["unit"], tuple(each["values"]), each["against"], tuple(each["reference"]))
        for each in found[0]
    )
    return Result(PART, measurement.name, Outcome.PASSED, time.monotonic() - began_s, figures=figures)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything that there is time for.

    Args:
        arguments: of the command line (default: this process's).

    Returns:
        1 if a measurement failed, else 0.
    """
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--results", type=Path, required=True, metavar="DIR", help="where the results go")
    options.add_argument("--limit-s", type=float, default=420.0, help="for all measurements (default: 420)")
    options.add_argument("--only", default="", metavar="NAME,...", help="of the functions in figures.py")
    args = options.parse_args(arguments)
    import torch

    has_cuda = torch.cuda.is_available()
    ends_s = time.monotonic() + args.limit_s
    names = [name for name in args.only.split(",") if name]
    failed = False
    for measurement in MEASUREMENTS:
        if names and measurement.name not in names:
            continue
        if time.monotonic() + measurement.limit_s > ends_s + 60.0:
            result = Result(PART, measurement.name, Outcome.CUT, 0.0, "there was no time left")
        else:
            result = measure(measurement, has_cuda)
        failed = failed or results.has_failed([result])
        results.add(args.results, result)
        print(f"{measurement.name}: {result.outcome.value} {result.seconds:.1f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
