"""Nodes that move at drawn steps, some killed meanwhile: `python benchmarks/moves/run.py --run-dir D --cases 60`.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: sums would depend on the ranks of a node

from benchmarks.common import interruptible, machine, progress, search_path
from checkpointless.launcher.agent.launch import AgentProcess
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.observability.report.incidents import IncidentSummary, summarize
from checkpointless.observability.report.verify import compare
from checkpointless.observability.telemetry.events import read_events
from checkpointless.observability.telemetry.steps import Recording, read_steps
from checkpointless.system.environment import TOKEN_ENV
from checkpointless.testing.demo.trainers import TRAINERS, Task
from checkpointless.testing.jobs import Job, import_once, run_jobs
from tests.ports import free_port

RANKS, NODES = 4, 2
LIMIT_S = 240.0
STEP_OF_REQUEST = (3, 8)
#: After which of the move's lines the leaving node is killed, and how many seconds later at most.
KILLS = {"its successors start": 1.0, "has successors on the spare": 2.0}
_POLL_S = 0.01


@dataclass(frozen=True)
class Layout:
    """A job of one of the demo's trainers.

    Attributes:
        holders: ranks that hold each shard of the optimizer or the model.
        steps: so many that a move is over before the job is.
        more: further arguments.
        has_replicas: whether the ranks of each node hold all that those of the other one hold.
    """

    name: str
    trainer: str
    sizes: dict[str, int] = field(default_factory=dict)
    holders: int = 2
    steps: int = 28
    more: tuple[str, ...] = ()
    has_replicas: bool = True

    def config(self, run_dir: Path, base: LaunchConfig) -> LaunchConfig:
        task = Task(RANKS, self.steps, self.sizes, dropout=0.1, holders=self.holders)
        made = TRAINERS[self.trainer].config(task, run_dir)
        return replace(
            made,
            script_args=(*made.script_args, *self.more),
            preload=base.preload,
            fork_here=True,
            faults=base.faults,
            heartbeat_timeout_s=60.0,
        )


LAYOUTS = (
    Layout("loop, DDP, dp=4", "ddp", steps=50),
    Layout("NeMo, dp=4", "nemo"),
    Layout("loop, FSDP2, fully sharded", "hsdp", holders=1, has_replicas=False),
    Layout("NeMo, tp=2 dp=2", "nemo", {"tp": 2}),
    Layout("loop, HSDP 2x2", "hsdp"),
    Layout("NeMo, pp=2 dp=2, a replica per node", "nemo", {"pp": 2}, more=("strategy.use_tp_pp_dp_mapping=true",)),
    Layout("Lightning, DDP, dp=4", "lightning-ddp", steps=50),
    Layout("NeMo, pp=2 dp=2, a stage per node", "nemo", {"pp": 2}, has_replicas=False),
    Layout("Lightning, HSDP 2x2", "lightning-hsdp"),
    Layout("Megatron-core loop, tp=2 dp=2", "megatron", {"tp": 2}),
    Layout("Lightning, HSDP, tp=2 dp=2", "lightning-hsdp", {"tp": 2}),
    Layout("Megatron-core loop, pp=2 dp=2", "megatron", {"pp": 2}, has_replicas=False),
)


@dataclass(frozen=True)
class Case:
    """One move, after ``step``, of ``node``, which is killed ``kill_s`` seconds after the line ``kill_after``."""

    number: int
    layout: Layout
    node: int
    step: int
    kill_after: str = ""
    kill_s: float = 0.0

    @property
    def text(self) -> str:
        killed = f", killed {self.kill_s:.2f} s after {self.kill_after!r}" if self.kill_after else ""
        return f"{self.layout.name}: node {self.node} after step {self.step}{killed}"


@dataclass(frozen=True)
class Result:
    """What came of a case.

    Attributes:
        wrong: "" if all bits are those of the undisturbed job, and nothing else is wrong.
        moved: what the request's last line says.
        redone: steps that were made more than once.
        stop_s: from the fault or the pause until the next step is made, of each incident.
    """

    wrong: str
    moved: str
    redone: int
    causes: tuple[str, ...]
    stop_s: tuple[float, ...]
    took_s: float


def draw(seed: int, number: int) -> Case:
    """Return the case with a number. In two rounds of three, the nodes that have replicas are killed."""
    dice = random.Random(f"moves/{seed}/{number}")
    layout = LAYOUTS[number % len(LAYOUTS)]
    node, step = dice.randrange(NODES), dice.randint(*STEP_OF_REQUEST)
    line = dice.choice(list(KILLS))
    kill_s = dice.uniform(0.0, KILLS[line])
    if number // len(LAYOUTS) % 3 and layout.has_replicas:
        return Case(number, layout, node, step, line, kill_s)
    return Case(number, layout, node, step)


# --- running ------------------------------------------------------------------------------------------------------


@contextmanager
def nodes(layout: Layout, run_dir: Path, base: LaunchConfig, spares: int = 1) -> Iterator[Nodes]:
    """Run two agents, spares, and a coordinator in a process of its own; all are gone after the block."""
    made = Nodes(layout, run_dir, base, spares)
    try:
        yield made
    finally:
        for agent in made.agents:
            agent.kill()
        made.coordinator.kill()
        made.coordinator.wait()


class Nodes:
    """A job of two nodes of two ranks, whose coordinator has a process of its own."""

    def __init__(self, layout: Layout, run_dir: Path, base: LaunchConfig, spares: int) -> None:
        self.run_dir, self._by_s = run_dir, time.monotonic() + LIMIT_S
        self.endpoint, self._env = f"127.0.0.1:{free_port()}", {**os.environ, TOKEN_ENV: secrets.token_hex(32)}
        run_dir.mkdir(parents=True)
        shared = ["--nnodes", str(NODES), "--nproc-per-node", str(RANKS // NODES), "--node-timeout", "3"]
        self.coordinator = self.command("coordinator", *shared, "--run-dir", str(run_dir))
        self.wait(lambda: "coordinating" in self.said("coordinator"), "the coordinator does not listen")
        config = replace(
            layout.config(run_dir, base),
            nproc_per_node=RANKS // NODES,
            nnodes=NODES,
            spares=spares,
            node_timeout_s=3.0,
            rdzv_endpoint=self.endpoint,
            token=self._env[TOKEN_ENV],
        )
        self.agents = [AgentProcess(replace(config, node_rank=node)) for node in range(NODES + spares)]

    def command(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """Start a command of the launcher, whose lines are kept in a file."""
        words = [sys.executable, "-m", "checkpointless", name, *options, "--rdzv-endpoint", self.endpoint]
        with (self.run_dir / f"{name}.said").open("wb") as said:
            return subprocess.Popen(words, env=self._env, stdin=subprocess.DEVNULL, stdout=said, stderr=said)

    def said(self, name: str) -> str:
        return (self.run_dir / f"{name}.said").read_text()

    def wait(self, condition: Callable[[], object], problem: str) -> None:
        while not condition():
            if time.monotonic() > self._by_s:
                raise TimeoutError(problem)
            time.sleep(_POLL_S)

    def has_made(self, step: int) -> bool:
        path = self.run_dir / "steps" / "rank-0.jsonl"
        return path.exists() and path.read_bytes().count(b"\n") >= step

    def end(self) -> None:
        self.wait(lambda: all([each.poll() is not None for each in self.agents]), "the job did not end in time")
        self.wait(lambda: self.coordinator.poll() is not None, "the coordinator did not end in time")


def run_case(case: Case, calm: Recording, run_dir: Path, base: LaunchConfig) -> Result:
    """Run a job, move a node, and judge what came of it."""
    began_s, killed = time.monotonic(), False
    with nodes(case.layout, run_dir, base) as job:
        try:
            job.wait(lambda: job.has_made(case.step), f"step {case.step} is not made")
            move = job.command("move", "--node", str(case.node))
            if case.kill_after:
                job.wait(lambda: case.kill_after in job.said("move") or move.poll() is not None, "it says nothing")
                time.sleep(case.kill_s)
                killed = job.agents[case.node].poll() is None
                job.agents[case.node].kill()
            job.wait(lambda: move.poll() is not None, "the move did not end in time")
            job.end()
        except TimeoutError as error:
            return Result(str(error), "", 0, (), (), time.monotonic() - began_s)
        codes = [job.coordinator.returncode, *(each.returncode for each in job.agents)]
        lines = job.said("move").splitlines()
    if killed:
        del codes[1 + case.node]
    steps, incidents = read_steps(run_dir), summarize(read_events(run_dir))
    wrong = _wrong(case, calm, steps, incidents, killed)
    if any(codes):
        wrong = [f"exit codes {codes}: {job.said('coordinator').splitlines()[-1]}", *wrong]
    elif move.returncode != 0 and not killed:
        wrong.append("it was not moved")
    stops = tuple(round(each.headline_s, 3) for each in incidents if each.headline_s is not None)
    causes, took_s = tuple(each.how for each in incidents), round(time.monotonic() - began_s, 1)
    return Result("; ".join(wrong), lines[-1] if lines else "", _redone(steps), causes, stops, took_s)


def _wrong(
    case: Case, calm: Recording, steps: Recording, incidents: Sequence[IncidentSummary], killed: bool
) -> list[str]:
    """Return what is wrong with a job that has ended."""
    verdict, wrong = compare(calm, steps), []
    if not verdict.equal or verdict.steps != case.layout.steps:
        wrong.append(f"verify: {verdict.sentence} ({verdict.steps} steps)")
    wrong += [f"inexact: {each.inexact}" for each in incidents if each.inexact]
    if any(each.steps_lost for each in incidents):
        wrong.append("steps were lost")
    if not killed and ([each.how for each in incidents] != ["planned"] or _redone(steps)):
        wrong.append(f"{_redone(steps)} steps redone, incidents: {[each.how for each in incidents]}")
    return wrong


def _redone(steps: Recording) -> int:
    """Return how many steps the rank that made the most of them twice has made more than once."""
    return max(len(records) - len({(each.fit, each.step) for each in records}) for records in steps.values())


class Calm:
    """Undisturbed jobs on one node, and recoveries in place on two, of each layout once."""

    def __init__(self, base: LaunchConfig, folder: Path) -> None:
        self._base, self._folder = base, folder

    def steps(self, layout: Layout) -> Recording:
        """Return what the job without a move has recorded."""
        run_dir = self._folder / f"calm-{LAYOUTS.index(layout)}"
        if not (run_dir / "ended").exists():
            shutil.rmtree(run_dir, ignore_errors=True)
            (ended,) = run_jobs([Job("calm", [layout.config(run_dir, self._base)], LIMIT_S)])
            if not ended.is_good:
                raise RuntimeError(f"{layout.name}: without a move it ended with {ended.code}: {run_dir}")
            (run_dir / "ended").touch()
        return read_steps(run_dir)

    def in_place_s(self, layout: Layout) -> float | None:
        """Return the seconds of a recovery in place from an exception, on two nodes."""
        run_dir = self._folder / f"in-place-{LAYOUTS.index(layout)}"
        if not (run_dir / "ended").exists():
            shutil.rmtree(run_dir, ignore_errors=True)
            base = replace(self._base, faults=("exception@between:rank=3,step=20",))
            with nodes(layout, run_dir, base, spares=0) as job:
                job.end()
            (run_dir / "ended").touch()
        (incident,) = summarize(read_events(run_dir))
        return incident.headline_s


# --- showing ------------------------------------------------------------------------------------------------------


def table(results: Sequence[tuple[Case, Result]], in_place_s: dict[str, float | None]) -> str:
    """Return the table by layout, and the sum."""
    head = ("job", "moves", "killed meanwhile", "wrong", "redone in moves", "stop of a move, s", "in place, s")
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for layout in LAYOUTS:
        of_it = [(case, result) for case, result in results if case.layout == layout]
        if of_it:
            moves = [result for case, result in of_it if not case.kill_after]
            stops = [each for result in moves for each in result.stop_s]
            place_s = in_place_s.get(layout.name)
            cells = [layout.name, len(moves), len(of_it) - len(moves), sum(bool(each.wrong) for _, each in of_it)]
            cells += [sum(each.redone for each in moves)]
            cells += [
                f"{statistics.median(stops):.2f}" if stops else "",
                "" if place_s is None else f"{place_s:.2f}",
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    causes = Counter(cause for case, result in results if case.kill_after for cause in result.causes)
    after = ", ".join(f"{count} {cause}" for cause, count in sorted(causes.items()))
    wrong = sum(bool(result.wrong) for _, result in results)
    lines += ["", f"{len(results)} cases, {wrong} wrong; incidents of jobs with a kill: {after or 'none'}"]
    return "\n".join(lines)


def _known(log: Path, seed: int) -> dict[int, Result]:
    """Return what an earlier call has found."""
    rows = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
    found: dict[int, Result] = {}
    for row in rows:
        if row["seed"] == seed:
            result: dict[str, Any] = row["result"]
            found[row["case"]["number"]] = Result(**{**result, "stop_s": tuple(result["stop_s"])})
    return found


def main() -> int:
    """Run the cases that have not been run, and show what came of all."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--cases", type=int, default=60, metavar="N", help="default: 60")
    options.add_argument("--seed", type=int, default=1, metavar="K", help="of the draws (default: 1)")
    options.add_argument("--case", type=int, action="append", metavar="I", help="only this one, also if it was run")
    options.add_argument("--run-dir", type=Path, required=True, metavar="D", help="goes on there")
    options.add_argument("--most", type=int, default=1000, metavar="N", help="cases that this call runs at most")
    options.add_argument("--json", type=Path, metavar="FILE", help="where the results go (default: only shown)")
    args = options.parse_args()
    os.environ["PYTHONPATH"] = search_path()  # for what the jobs start
    folder = args.run_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    log, about = folder / "cases.jsonl", machine(["checkpointless", "torch", "nemo_toolkit", "megatron-core"])
    known = {} if args.case else _known(log, args.seed)
    due = [draw(args.seed, number) for number in args.case or range(args.cases) if number not in known]
    in_place_s: dict[str, float | None] = {}
    with interruptible():
        progress("importing what all jobs need")
        names = dict.fromkeys(name for layout in LAYOUTS for name in TRAINERS[layout.trainer].preload())
        first = replace(TRAINERS["nemo"].config(Task(RANKS, 1), folder), preload=tuple(names))
        base = import_once(first, folder / "imports.txt")
        calm = Calm(base, folder)
        for case in due[: args.most]:
            progress(f"case {case.number}: {case.text}")
            run_dir = folder / f"case-{args.seed}-{case.number}"
            shutil.rmtree(run_dir, ignore_errors=True)
            result = run_case(case, calm.steps(case.layout), run_dir, base)
            calm.in_place_s(case.layout)
            known[case.number] = result
            row = {"seed": args.seed, "commit": about["commit"], "case": asdict(case), "result": asdict(result)}
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
            said = f"{result.wrong or 'equal'}; {list(result.causes)}, stops {list(result.stop_s)} s"
            print(f"    {said}, took {result.took_s:.0f} s: {result.moved}", flush=True)
            if not result.wrong and not args.case:
                shutil.rmtree(run_dir)
        results = [(draw(args.seed, number), result) for number, result in sorted(known.items())]
        for case, _ in results:
            in_place_s[case.layout.name] = calm.in_place_s(case.layout)
    print(f"\n{about['date']}, {about['cpu']}, {about['cores']} cores, commit {about['commit']}\n")
    print(table(results, in_place_s))
    if args.json is not None:
        rows = [{"case": asdict(case), "result": asdict(result)} for case, result in results]
        figures = {"machine": about, "seed": args.seed, "in_place_s": in_place_s, "cases": rows}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(any(result.wrong for _, result in results))


if __name__ == "__main__":
    sys.exit(main())
