"""Fault to re-entry, against NVRx's in-process restart: `python benchmarks/reentry/run.py --json results.json`."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import (
    TARGETS,
    Job,
    folder_of_runs,
    install_beside,
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
from benchmarks.reentry.block import VICTIM, Fault, Peers

HERE = Path(__file__).resolve().parent
NPROC = 4
START_LIMIT_S = 120.0
NVRX_VERSION = "0.4.1"
NVRX_TARGET = TARGETS / f"nvrx-{NVRX_VERSION}"
# It, and what it imports and checkpointless does not need; torch is the same for all.
NVRX_PACKAGES = (f"nvidia-resiliency-ext=={NVRX_VERSION}", "defusedxml", "nvidia-ml-py", "pynvml")
OURS, NVRX, NVRX_IMPATIENT = "checkpointless", "nvrx", "nvrx-10s-collectives"
# What a collective may take under NVRx: torch's default for gloo, and less than a real job could bear.
COLLECTIVE_TIMEOUT_S = {NVRX: 1800.0, NVRX_IMPATIENT: 10.0}
SIDES = (OURS, NVRX, NVRX_IMPATIENT)


@dataclass(frozen=True)
class Outcome:
    """One fault.

    Attributes:
        reentry_s: fault to the last rank's re-entry; None if the ranks did not re-enter.
        collective_s: fault to the end of the last rank's first collective after it; None if there was none.
        ranks: how many re-entered.
        said: "re-entered", "job lost" or "> 60 s" (or whatever the limit was).
    """

    side: str
    fault: str
    peers: str
    reentry_s: float | None
    collective_s: float | None
    ranks: int
    said: str


def job(side: str, fault: Fault, peers: Peers, directory: Path) -> Job:
    """The processes of one side."""
    arguments = [str(directory), fault.value, peers.value]
    log = directory / "output.log"
    if side == OURS:
        command = [sys.executable, "-m", "checkpointless", "run", "--nproc-per-node", str(NPROC)]
        command += ["--run-dir", str(directory / "run"), str(HERE / "checkpointless_side.py"), *arguments]
        return Job([command], [{"PYTHONPATH": search_path()}], log)
    ports = _free_ports(2)
    environments = [
        {
            "PYTHONPATH": search_path(NVRX_TARGET),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(NPROC),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports[0]),
            "BENCHMARK_STORE_PORT": str(ports[1]),
            "BENCHMARK_COLLECTIVE_TIMEOUT_S": str(COLLECTIVE_TIMEOUT_S[side]),
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(NPROC)
    ]
    return Job([[sys.executable, str(HERE / "nvrx_side.py"), *arguments]] * NPROC, environments, log)


def measure(side: str, fault: Fault, peers: Peers, directory: Path, limit_s: float) -> Outcome:
    """Cause one fault and wait for the ranks to be back, at most ``limit_s`` after it."""
    directory.mkdir(parents=True)
    expected = NPROC if side == OURS or fault is Fault.EXCEPTION else NPROC - 1

    def times(what: str, generation: int) -> dict[int, float]:
        return {
            mark.rank: mark.at_s
            for mark in read_marks(directory)
            if mark.what == what and mark.detail["generation"] == generation
        }

    with job(side, fault, peers, directory) as running:
        if not wait_for(lambda: times("fault", 0) or running.ended, START_LIMIT_S) or not times("fault", 0):
            raise RuntimeError(f"the {side} job did not come to its fault; see {directory / 'output.log'}")
        in_time = wait_for(lambda: len(times("collective", 1)) == expected or running.ended, limit_s)
        entries, collectives = times("entry", 1), times("collective", 1)
    at_s = times("fault", 0)[VICTIM]
    back = len(entries) == expected
    return Outcome(
        side=side,
        fault=fault.value,
        peers=peers.value,
        reentry_s=max(entries.values()) - at_s if back else None,
        collective_s=max(collectives.values()) - at_s if len(collectives) == expected else None,
        ranks=len(entries),
        said="re-entered" if back else "job lost" if in_time else f"> {limit_s:g} s",
    )


def main() -> None:
    """Run all cases, alternating between the sides, and show the table."""
    options = parser((__doc__ or "").partition(":")[0])
    options.add_argument("--limit", type=float, default=60.0, metavar="S", help="wait no longer (default: 60)")
    options.add_argument("--side", choices=SIDES, help="only this side")
    options.add_argument("--fault", choices=[each.value for each in Fault], help="only this fault")
    options.add_argument("--peers", choices=[each.value for each in Peers], help="only with peers like this")
    args = options.parse_args()
    about = machine(["torch", "checkpointless"])
    if args.side != OURS:
        install_beside(NVRX_TARGET, *NVRX_PACKAGES)
        about["versions"]["nvidia-resiliency-ext"] = NVRX_VERSION
    cases = [
        (fault, peers)
        for fault, peers in product(Fault, Peers)
        if args.fault in (None, fault.value) and args.peers in (None, peers.value)
    ]
    outcomes: list[Outcome] = []
    hopeless: set[tuple[str, str, str]] = set()
    with interruptible(), ExitStack() as stack:
        base = stack.enter_context(folder_of_runs(args.keep, "reentry-"))
        for repeat, (fault, peers), side in product(range(args.repeats), cases, SIDES):
            if args.side not in (None, side) or (side == NVRX_IMPATIENT and peers is not Peers.BLOCKED):
                continue
            if (side, fault.value, peers.value) in hopeless:
                continue
            directory = base / f"{fault.value}-{peers.value}-{side}-{repeat}"
            shutil.rmtree(directory, ignore_errors=True)
            outcome = measure(side, fault, peers, directory.resolve(), args.limit)
            outcomes.append(outcome)
            if outcome.said.startswith(">"):
                hopeless.add((side, fault.value, peers.value))  # waited for once is enough
            figure = f"{outcome.reentry_s:.3f} s" if outcome.reentry_s is not None else outcome.said
            progress(
                f"{repeat + 1}/{args.repeats} {fault.value}, peers {peers.value}: {side} {figure}, "
                f"{outcome.ranks} of {NPROC} ranks re-entered"
            )
    _report(outcomes, about, args.json)


def _report(outcomes: list[Outcome], about: dict[str, Any], path: Path | None) -> None:
    groups: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.fault, outcome.peers, outcome.side].append(outcome)
    print("\n| fault | peers | side | fault to last re-entry, s | to working collectives, s | ranks back |")
    print("| --- | --- | --- | --- | --- | --- |")
    summary = []
    for (fault, peers, side), group in groups.items():
        reentries = [each.reentry_s for each in group if each.reentry_s is not None]
        collectives = [each.collective_s for each in group if each.collective_s is not None]
        failed = sorted(each.said for each in group if each.reentry_s is None)
        said = "; ".join(filter(None, [shown(reentries) if reentries else "", ", ".join(failed)]))
        ranks = "/".join(sorted({str(each.ranks) for each in group}))
        print(f"| {fault} | {peers} | {side} | {said} | {shown(collectives)} | {ranks} of {NPROC} |")
        entry: dict[str, Any] = {"fault": fault, "peers": peers, "side": side, "failed": failed, "ranks": ranks}
        entry["reentry_s"] = spread(reentries) if reentries else None
        entry["collective_s"] = spread(collectives) if collectives else None
        summary.append(entry)
    if path is not None:
        results = {"machine": about, "summary": summary, "runs": [asdict(each) for each in outcomes]}
        path.write_text(json.dumps(results, indent=1) + "\n")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


if __name__ == "__main__":
    main()
