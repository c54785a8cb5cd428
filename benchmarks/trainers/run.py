"""DDP and a fault, with checkpointless, torchft and torchrun: `python benchmarks/trainers/run.py --json FILE`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import (
    TARGETS,
    Job,
    Mark,
    folder_of_runs,
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
from benchmarks.trainers.model import FAULT_STEP, RANKS, VICTIM

HERE = Path(__file__).resolve().parent
# In 0.2.0 the ranks that live die of the fault as well, by an assertion in its DistributedDataParallel. The nightly
# build has that mended.
RELEASE, NIGHTLY = "torchft==0.2.0", "torchft-nightly==2026.10.26"
OURS, CHECKPOINT, NVRX = "checkpointless", "checkpoint", "nvrx"
FAULTS = ("exception", "killed")
NONE = "none"
LIMIT_S = 400.0
_PORTS = range(20000, 30000)
LEFT_ALONE_S = 30.0  # a rank that is not back when the others have ended does not come to its end in this time


@dataclass(frozen=True)
class TorchftSetting:
    """How torchft is run.

    Attributes:
        lighthouse: options of its lighthouse, beside the following.
        min_replicas: without how many replica groups no step is begun or committed.
        environment: variables of the ranks.
        package: which torchft.
        example: whether everything else is as in its example, `train_ddp.py`.
    """

    lighthouse: str
    min_replicas: int
    environment: dict[str, str]
    package: str
    example: bool

    @property
    def binaries(self) -> Path:
        """Where the commands of its environment are, which is not the folder that `../transfer` has torchft in."""
        return TARGETS / f"{self.package.replace('==', '-')}-with-torch" / "bin"

    @property
    def lighthouse_command(self) -> Path:
        """Its lighthouse, by which the replica groups find each other."""
        return self.binaries / "torchft_lighthouse"


_QUICK = "--quorum_tick_ms 10 --join_timeout_ms 10000 --heartbeat_timeout_ms 1000"
TORCHFT_SETTINGS = {
    # The command of its README, and train_ddp.py.
    "torchft-example": TorchftSetting("--quorum_tick_ms 100 --join_timeout_ms 10000", 1, {}, RELEASE, True),
    # A dead rank is missed sooner.
    "torchft-quick": TorchftSetting(_QUICK, 3, {}, NIGHTLY, False),
    # No step without the batches of all: the others wait for the rank that is started again.
    "torchft-exact": TorchftSetting(_QUICK, 4, {"TORCHFT_QUORUM_TIMEOUT_SEC": "300"}, NIGHTLY, False),
}
# Where three ranks train on, there have to be steps left when the fourth is back.
STEPS = {OURS: 40, CHECKPOINT: 40, NVRX: 40, "torchft-example": 200, "torchft-quick": 200, "torchft-exact": 40}
# NVRx is in no environment but that of Bridge 0.6.
SIDES = tuple(side for side in STEPS if side != NVRX or importlib.util.find_spec("nvidia_resiliency_ext"))


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        fault: or "none".
        any_s: fault to the end, on any rank, of the first step that is committed after it; None without a fault.
        all_s: fault to the end, on the last rank, of the first step with the batches of all ranks; None if there is
            none.
        batches_lost: how many of the batches, one per rank and step, are in no step.
        repeated: how many steps were made again that every rank had completed before the fault.
        digests: of the parameters of each rank that came to its end, each once.
        ended: how: "well", "failed", "late" (not within the limit), or "alone" (all ranks but one have ended).
    """

    side: str
    fault: str
    any_s: float | None
    all_s: float | None
    batches_lost: int
    repeated: int
    digests: list[str]
    ended: str


def make_environment(setting: TorchftSetting) -> None:
    """Put a torchft, with this environment's torch, into an environment of its own, unless it is there.

    Raises:
        SystemExit: it cannot be installed.
    """
    folder = setting.binaries.parent
    if setting.lighthouse_command.exists():  # an attempt that was cut short leaves the folder without it
        return
    progress(f"installing {setting.package} into {folder}")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pinned = f"torch=={torch.__version__.partition('+')[0]}"  # any other torch might be one with gigabytes of CUDA
    pip = [str(setting.binaries / "python"), "-m", "pip", "install", "--quiet", pinned]
    if subprocess.run([*pip, setting.package, "numpy", "psutil"], check=False).returncode != 0:
        others = f"--side {OURS} --side {CHECKPOINT}"
        raise SystemExit(f"{setting.package} could not be installed into {folder}; without torchft: {others}")


def job(side: str, fault: str, directory: Path, lighthouse_port: int) -> Job:
    """Return the processes of one side."""
    environment = {"PYTHONPATH": search_path(HERE), "OMP_NUM_THREADS": "1"}
    arguments = [str(directory), str(STEPS[side]), fault]
    log = directory / "output.log"
    if side == OURS:
        command = [sys.executable, "-m", "checkpointless", "run", "--nproc-per-node", str(RANKS)]
        command += ["--run-dir", str(directory / "run"), str(HERE / "checkpointless_side.py"), *arguments]
        return Job([command], [environment], log)
    if side == CHECKPOINT:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
        command += ["--max-restarts", "3", "--monitor-interval", "0.1"]
        # With torchrun's default, the agent's store, no restart works: gloo finds the dead ranks' addresses.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return Job([[*command, str(HERE / "checkpoint_side.py"), *arguments]], [environment], log)
    if side == NVRX:
        ports = dict(zip(("MASTER_PORT", "BENCHMARK_STORE_PORT"), map(str, free_ports(2)), strict=True))
        environment |= {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", **ports}
        ranks = [{**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
        return Job([[sys.executable, str(HERE / "nvrx_side.py"), *arguments]] * RANKS, ranks, log)
    setting = TORCHFT_SETTINGS[side]
    environment |= {
        "TORCHFT_LIGHTHOUSE": f"http://localhost:{lighthouse_port}",
        "NUM_REPLICA_GROUPS": str(RANKS),
        "BENCHMARK_MIN_REPLICAS": str(setting.min_replicas),
        "BENCHMARK_AS_IN_THE_EXAMPLE": str(int(setting.example)),
        **setting.environment,
    }
    torchrun = [str(setting.binaries / "python"), "-m", "torch.distributed.run", "--nnodes", "1"]
    torchrun += ["--nproc-per-node", "1", "--max-restarts", "10", "--monitor-interval", "0.1"]
    commands = [
        [*torchrun, "--master-port", str(port), str(HERE / "torchft_side.py"), *arguments]
        for port in free_ports(RANKS)
    ]
    return Job(commands, [{**environment, "REPLICA_GROUP_ID": str(rank)} for rank in range(RANKS)], log)


def measure(side: str, fault: str, directory: Path) -> Outcome:
    """Train once."""
    directory.mkdir(parents=True)
    (port,) = free_ports(1)
    log = directory / "output.log"
    alone: list[float] = []

    def codes() -> list[int | None]:
        """The exit codes, but that of a process which was killed on purpose and has nobody to start it again."""
        lost = VICTIM if side == NVRX and fault == "killed" else None
        return [code for rank, code in enumerate(running.exit_codes()) if rank != lost]

    def over() -> bool:
        """Whether the job has ended, or a part of it has failed, or nothing more is to be expected of it."""
        if running.ended or any(codes()):
            return True
        ended = sum(mark.what == "end" for mark in read_marks(directory))
        if ended >= RANKS - 1 and not alone:
            alone.append(time.monotonic())
        return bool(alone) and time.monotonic() - alone[0] > LEFT_ALONE_S

    with ExitStack() as stack:
        if side in TORCHFT_SETTINGS:
            setting = TORCHFT_SETTINGS[side]
            lighthouse = [str(setting.lighthouse_command), "--bind", f"[::]:{port}"]
            lighthouse += ["--min_replicas", str(setting.min_replicas), *setting.lighthouse.split()]
            stack.enter_context(Job([lighthouse], [{}], log))
        running = stack.enter_context(job(side, fault, directory, port))
        in_time = wait_for(over, LIMIT_S)
        found = codes()
    ended = "failed" if any(found) else "well"
    if not any(found) and None in found:
        ended = "alone" if in_time else "late"
    return judge(side, fault, read_marks(directory), ended)


def judge(side: str, fault: str, marks: list[Mark], ended: str) -> Outcome:
    """Return what a run's marks say, and how it ended."""
    at_s = next((mark.at_s for mark in marks if mark.what == "fault"), float("inf"))
    made: dict[int, list[Mark]] = defaultdict(list)
    for mark in marks:
        if mark.what == "step":
            made[mark.detail["step"]].append(mark)
    before = {step for step, each in made.items() if len({m.rank for m in each if m.at_s < at_s}) == RANKS}
    after = [mark for mark in marks if mark.what == "step" and mark.at_s > at_s]
    new = [mark for mark in after if mark.detail["step"] >= FAULT_STEP]
    together = []
    for step in {mark.detail["step"] for mark in new}:
        each = [mark for mark in new if mark.detail["step"] == step]
        if len({mark.rank for mark in each}) == RANKS and all(mark.detail["ranks"] == RANKS for mark in each):
            together.append(max(mark.at_s for mark in each))
    batches = sum(max(mark.detail["ranks"] for mark in each) for each in made.values())
    return Outcome(
        side=side,
        fault=fault,
        any_s=min(mark.at_s for mark in new) - at_s if new else None,
        all_s=min(together) - at_s if together else None,
        batches_lost=RANKS * STEPS[side] - batches,
        repeated=len(before & {mark.detail["step"] for mark in after}),
        digests=sorted({mark.detail["digest"] for mark in marks if mark.what == "end"}),
        ended=ended,
    )


def main() -> None:
    """Run all cases, alternating between the sides, and show the table."""
    options = parser((__doc__ or "").partition(":")[0])
    options.add_argument("--side", choices=SIDES, action="append", help="only this side; may be repeated")
    args = options.parse_args()
    sides = args.side or SIDES
    settings = [setting for side, setting in TORCHFT_SETTINGS.items() if side in sides]
    for setting in settings:
        make_environment(setting)
    about = machine(["torch", "checkpointless"])
    if NVRX in sides:
        about["versions"]["nvidia-resiliency-ext"] = importlib.metadata.version("nvidia-resiliency-ext")
    about["versions"] |= dict(setting.package.split("==") for setting in settings)
    outcomes: list[Outcome] = []
    # Twice undisturbed: what differs between these two cannot be held against a recovery.
    kinds = [NONE, *FAULTS * args.repeats, NONE]
    with interruptible(), ExitStack() as stack:
        base = stack.enter_context(folder_of_runs(args.keep, "trainers-"))
        for (number, fault), side in product(enumerate(kinds), sides):
            directory = (base / f"{number}-{fault}-{side}").resolve()
            shutil.rmtree(directory, ignore_errors=True)
            outcome = measure(side, fault, directory)
            outcomes.append(outcome)
            progress(f"{number + 1}/{len(kinds)} {fault}: {_sentence(outcome)}; load {os.getloadavg()[0]:.0f}")
    about["load_at_end"] = os.getloadavg()[0]
    _report(outcomes, about, args.json)


def _sentence(outcome: Outcome) -> str:
    times = [f"{time_s:.2f} s" if time_s is not None else "-" for time_s in (outcome.any_s, outcome.all_s)]
    digests = "/".join(each[:8] for each in outcome.digests)
    return (
        f"{outcome.side} any {times[0]}, all {times[1]}, {outcome.batches_lost} batches lost, "
        f"{outcome.repeated} steps repeated, parameters {digests}, ended {outcome.ended}"
    )


def _report(outcomes: list[Outcome], about: dict[str, Any], path: Path | None) -> None:
    calm: dict[str, set[str]] = defaultdict(set)
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.fault == NONE:
            calm[outcome.side] |= set(outcome.digests)
        else:
            groups[outcome.fault, outcome.side].append(outcome)
    print(
        f"\n| fault | side | fault to the next step of any rank, s | with all {RANKS} ranks, s | batches lost |",
        end="",
    )
    print(" steps repeated | parameters as undisturbed |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    summary = []
    for (fault, side), group in sorted(groups.items()):
        lost = sorted(each.batches_lost for each in group)
        same = sum(len(calm[side]) == 1 and set(each.digests) == calm[side] for each in group)
        first = [each.any_s for each in group if each.any_s is not None]
        full = [each.all_s for each in group if each.all_s is not None]
        span = f"{lost[0]}" if lost[0] == lost[-1] else f"{lost[0]} to {lost[-1]}"
        repeated = max(each.repeated for each in group)
        equal = f"{same} of {len(group)}"
        print(f"| {fault} | {side} | {shown(first)} | {shown(full)} | {span} | {repeated} | {equal} |")
        summary.append(
            {
                "fault": fault,
                "side": side,
                "any_s": spread(first) if first else None,
                "all_s": spread(full) if full else None,
                "runs": len(group),
                "batches_lost": lost,
                "repeated": repeated,
                "ended": sorted(each.ended for each in group),
                "parameters_as_undisturbed": same,
            }
        )
    for side, digests in calm.items():
        print(f"{side}: undisturbed runs end in {len(digests)} kind(s) of parameters")
    print(f"load {about['load_at_start']:.0f} at the start, {about['load_at_end']:.0f} at the end")
    if path is not None:
        results = {"machine": about, "summary": summary, "runs": [asdict(each) for each in outcomes]}
        path.write_text(json.dumps(results, indent=1) + "\n")


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, and that the system gives to nobody who asks for any port."""
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(_PORTS, len(_PORTS)):
            try:
                stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError(f"fewer than {count} free ports")


if __name__ == "__main__":
    main()
