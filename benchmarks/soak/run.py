"""Several hundred incidents in one job, and what grows: `python benchmarks/soak/run.py --json results.json`.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import ROOT, folder_of_runs, interruptible, machine, progress, search_path
from checkpointless.faults.ledger import fired
from checkpointless.observability.report.incidents import IncidentSummary, Outcome, summarize
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import read_events

NPROC = 4
SLOW_S = 20.0  # an incident that took longer is told with its reasons
HEARTBEAT_S = 4.0
STEPS_BETWEEN = 2  # from one incident to the next
EDGE = 20  # incidents at the beginning and at the end that are compared
SURVIVOR = 0  # the rank whose process lives through everything
SHARED_MEMORY = Path("/dev/shm")
#: In turn. What hangs is found at the limit, so there is less of it.
KINDS = (
    *(
        "exception@forward",
        "sigkill@backward",
        "oom@backward",
        "exit@optimizer",
        "dataloader@data",
        "segfault@forward",
    ),
    *(
        "exception@optimizer",
        "abort@sync",
        "oom@data",
        "sigterm@forward",
        "exception@between",
        "sigkill@after_optimizer",
    ),
    *("hang@backward", "gil@forward", "sigstop@sync"),
)
IN_PROCESS = ("exception", "oom", "dataloader")
GROUPS = "groups"  # the folder in which ranks say which process groups of earlier generations are alive
ZYGOTE = "checkpointless.launcher.agent.ranks.zygote"


@dataclass(frozen=True)
class Sample:
    """What the job held at a moment outside of its ranks.

    Attributes:
        at_s: since the start.
        processes: of the job, all told.
        agent_rss_bytes: resident memory of the agent; likewise its threads, descriptors, and the zygote's memory.
        shared_memory: entries of /dev/shm that were not there before.
        temporary: files and sockets of the job in the folder for temporary files.
    """

    at_s: float
    processes: int
    agent_rss_bytes: int
    agent_threads: int
    agent_descriptors: int
    zygote_rss_bytes: int
    shared_memory: int
    temporary: int


class Sampler(threading.Thread):
    """Looks at a job once a second.

    Args:
        agent: its process.
        temporary: its folder for temporary files.
    """

    def __init__(self, agent: subprocess.Popen[bytes], temporary: Path) -> None:
        super().__init__(daemon=True)
        self.samples: list[Sample] = []
        self._process = agent
        self._agent = psutil.Process(agent.pid)
        self._temporary = temporary
        self._before = {path.name for path in SHARED_MEMORY.iterdir()}
        self._began_s = time.monotonic()

    def run(self) -> None:
        """Until the agent is gone."""
        while True:
            try:
                (zygote,) = [each for each in self._agent.children() if ZYGOTE in _command(each)]
                self.samples.append(
                    Sample(
                        at_s=time.monotonic() - self._began_s,
                        processes=1 + len(self._agent.children(recursive=True)),
                        agent_rss_bytes=self._agent.memory_info().rss,
                        agent_threads=self._agent.num_threads(),
                        agent_descriptors=self._agent.num_fds(),
                        zygote_rss_bytes=zygote.memory_info().rss,
                        shared_memory=len({path.name for path in SHARED_MEMORY.iterdir()} - self._before),
                        temporary=sum(len(files) for _, _, files in os.walk(self._temporary)),
                    )
                )
            except ValueError:
                progress("the agent has no zygote (yet)")
            except psutil.NoSuchProcess:
                if self._process.poll() is not None:
                    return
                # A child has ended meanwhile, or a step of the clock has moved the time at which the agent began.
                self._agent = psutil.Process(self._process.pid)
            time.sleep(1.0)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.ZombieProcess:  # what has examined the node is waited for at the end of the job
        return []


def faults_of(incidents: int) -> list[str]:
    """Specs, one every few steps, in ranks by turns; the survivor is spared by what ends a process."""
    specs = []
    for index in range(incidents):
        what = KINDS[index % len(KINDS)]
        ranks = range(NPROC) if what.startswith(IN_PROCESS) else range(1, NPROC)
        specs.append(f"{what}:rank={ranks[index % len(ranks)]},step={2 + STEPS_BETWEEN * index}")
    return specs


def soak(incidents: int, run_dir: Path, temporary: Path) -> tuple[list[IncidentSummary], list[Sample]]:
    """Run the job.

    Raises:
        RuntimeError: it failed, or not every fault happened or was recovered from.
    """
    specs = faults_of(incidents)
    words = ["train", "tiny_gpt_cpu", "--cpu", "--nproc-per-node", str(NPROC), "--run-dir", str(run_dir)]
    words += ["--heartbeat-timeout", str(HEARTBEAT_S)]
    words += [word for spec in specs for word in ("--fault", spec)]
    words += [f"trainer.max_steps={4 + STEPS_BETWEEN * incidents}", "data.num_workers=1"]
    checker = f"_target_: tests.ranks.warm_checks.OldGroups, folder: '{run_dir.parent / GROUPS}', after: 1"
    words += [f"callbacks.checker={{{checker}}}"]
    with (run_dir.parent / "agent.log").open("wb") as log:
        agent = subprocess.Popen(
            [sys.executable, "-m", "checkpointless", *words],
            env={**os.environ, "PYTHONPATH": search_path(), "TMPDIR": str(temporary)},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    sampler = Sampler(agent, temporary)
    sampler.start()
    try:
        done = 0
        while agent.poll() is None:
            time.sleep(5.0)
            happened = len(fired(run_dir))
            if happened // 10 > done:
                done = happened // 10
                progress(f"{happened} of {incidents} incidents")
    finally:
        agent.terminate()
        agent.wait()
    sampler.join(timeout=10)
    found = summarize(read_events(run_dir))
    lost = [f"{each.cause}: {each.reason}" for each in found if each.outcome is Outcome.FAILED]
    if agent.returncode != 0 or len(fired(run_dir)) != incidents or lost:
        raise RuntimeError(
            f"exit code {agent.returncode}, {len(fired(run_dir))} faults; not recovered from: {lost}"
        )
    return found, sampler.samples


def edges(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and of the last values, the very first one left out."""
    return statistics.median(values[1 : 1 + EDGE]), statistics.median(values[-EDGE:])


def table(settled: Sequence[dict[str, int]], samples: Sequence[Sample]) -> list[tuple[str, float, float, float]]:
    """For each quantity its median at the beginning and at the end, and its largest value."""
    rows = []
    samples = [sample for sample in samples if sample.processes >= 2 + NPROC]  # without start and end
    series: dict[str, list[float]] = {
        "survivor: memory, MB": [each["rss_bytes"] / 1e6 for each in settled],
        "survivor: threads": [each["threads"] for each in settled],
        "survivor: descriptors": [each["descriptors"] for each in settled],
        "agent: memory, MB": [each.agent_rss_bytes / 1e6 for each in samples],
        "agent: threads": [each.agent_threads for each in samples],
        "agent: descriptors": [each.agent_descriptors for each in samples],
        "zygote: memory, MB": [each.zygote_rss_bytes / 1e6 for each in samples],
        "processes of the job": [each.processes for each in samples],
        "entries in /dev/shm": [each.shared_memory for each in samples],
        "temporary files and sockets": [each.temporary for each in samples],
    }
    for name, values in series.items():
        rows.append((name, *edges(values), max(values)))
    return rows


def draw(
    incidents: Sequence[IncidentSummary], settled: Sequence[dict[str, int]], samples: Sequence[Sample], path: Path
) -> None:
    """The plot."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, figsize=(9, 10), layout="constrained")
    axes[0].plot([each["rss_bytes"] / 1e6 for each in settled], label="survivor, by incident")
    axes[0].set_ylabel("memory, MB")
    axes[1].plot([each["threads"] for each in settled], label="threads")
    axes[1].plot([each["descriptors"] for each in settled], label="descriptors")
    axes[1].set_ylabel("survivor")
    axes[2].plot([s.at_s for s in samples], [s.processes for s in samples], label="processes of the job, by second")
    axes[2].plot([s.at_s for s in samples], [s.agent_descriptors for s in samples], label="agent's descriptors")
    by_how: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for index, incident in enumerate(incidents):
        if incident.headline_s is not None:
            by_how[incident.how].append((index, incident.headline_s))
    for how, points in sorted(by_how.items()):
        axes[3].plot(*zip(*points, strict=True), ".", label=how)
    axes[3].set_ylabel("seconds of the incident")
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small", ncols=4)
    figure.savefig(path, dpi=80)


def main() -> None:
    """Run, and show what grew."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--incidents", type=int, default=300, metavar="N", help="default: 300")
    options.add_argument("--json", type=Path, metavar="FILE", help="where the results go (default: only shown)")
    options.add_argument("--plot", type=Path, metavar="FILE", help="where the plot goes (default: none)")
    options.add_argument("--run-dir", type=Path, metavar="D", help="keep the job's events and logs there")
    args = options.parse_args()
    about: dict[str, Any] = machine(["checkpointless", "torch", "nemo_toolkit", "megatron-core"])
    with interruptible(), folder_of_runs(None, "soak-") as folder:
        run_dir = args.run_dir or folder / "run"
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder / "tmp"
        temporary.mkdir()
        incidents, samples = soak(args.incidents, run_dir, temporary)
        print(f"temporary files that the job left: {[str(path) for path in temporary.rglob('*')]}")
        settled = [
            {name: int(event.fields[name]) for name in ("rss_bytes", "threads", "descriptors")}
            for event in read_events(run_dir)
            if event.rank == SURVIVOR and event.stage == EventName.SETTLED
        ]
        looks = [json.loads(line) for file in (run_dir.parent / GROUPS).iterdir() for line in file.open()]
        # Those of the generation before are let go of within two more steps (tests/ranks/test_warm.py).
        old = [look for look in looks if any(generation < look["generation"] - 1 for generation, _ in look["old"])]
    print(f"process groups older than those of the generation before: in {len(old)} of {len(looks)} generations")
    rows = table(settled, samples)
    print(f"\n| what | first {EDGE} | last {EDGE} | most |\n| --- | --- | --- | --- |")
    for name, first, last, most in rows:
        print(f"| {name} | {first:,.1f} | {last:,.1f} | {most:,.1f} |")
    print("\n| noticed as | incidents | seconds, first half | second half |\n| --- | --- | --- | --- |")
    by_how: dict[str, list[float]] = defaultdict(list)
    for incident in incidents:
        if incident.headline_s is not None:
            by_how[incident.how].append(incident.headline_s)
    for how, seconds in sorted(by_how.items()):
        half = len(seconds) // 2
        halves = [f"{statistics.median(part):.2f}" if part else "" for part in (seconds[:half], seconds[half:])]
        print(f"| {how} | {len(seconds)} | {halves[0]} | {halves[1]} |")
    endings = Counter(incident.outcome.value for incident in incidents)
    print(f"\n{len(incidents)} incidents of {args.incidents} faults: {dict(endings)}")
    for incident in incidents:
        slow = incident.headline_s is not None and incident.headline_s > SLOW_S
        if incident.outcome is not Outcome.RESUMED or slow:
            print(f"* {'; '.join((f'{incident.cause}: {incident.outcome.value}', *incident.steps_up))}")
    if args.plot is not None:
        draw(incidents, settled, samples, args.plot)
    if args.json is not None:
        results = {
            "machine": about,
            "rows": rows,
            "seconds": by_how,
            "settled": settled,
            "samples": [asdict(sample) for sample in samples],
        }
        args.json.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
