"""Faults in runs as users have them: `python benchmarks/users_chaos/run.py --cases 200 --seed 1 --run-dir D`.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import enum
import json
import os
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: sums would depend on the ranks of a node

from benchmarks.common import ROOT, interruptible, machine, progress, search_path
from benchmarks.users_chaos.draw import UsersCase, draw
from checkpointless.faults.ledger import fired
from checkpointless.faults.spec import DEADLY, HANGING, NODES, parse
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.observability.report.verify import compare
from checkpointless.observability.telemetry.steps import Recording, read_steps
from checkpointless.testing.demo.trainers import TRAINERS, Task
from checkpointless.testing.jobs import Ended, Job, import_once, run_jobs
from tests.ports import free_port
from tests.ranks.users.end import IN_ALL, Difference, compare_ends, read_ends
from tests.ranks.users.processes import replaced_healthy

SCRIPTS = ROOT / "tests" / "ranks" / "users"
LIMIT_S = 300.0
HEARTBEAT_S, HANG_HEARTBEAT_S = 60.0, 12.0
NODE_TIMEOUT_S, REGROUP_S = 3.0, 90.0
LOOPS = 2  # busy ones, beside half of the cases
_SHOWN = 4  # differences that are told


class Outcome(enum.Enum):
    """What came of a case."""

    EQUAL = "equal"
    REFUSED = "refused before it started"
    WRONG = "WRONG"


@dataclass(frozen=True)
class Result:
    """What came of a case.

    Attributes:
        outcome: in a word.
        why: what is wrong, or why it was refused.
        healthy: processes that were replaced and that no fault had been caused in, as ``rank:pid``.
        incidents: how many there were.
        seconds: from the first fault to the end of the last incident; None if there was none.
        took_s: the disturbed run.
    """

    outcome: Outcome
    why: tuple[str, ...] = ()
    healthy: tuple[str, ...] = ()
    incidents: int = 0
    seconds: float | None = None
    took_s: float = field(default=0.0, compare=False)


# --- running ------------------------------------------------------------------------------------------------------


class Calm:
    """Undisturbed runs, each kind made once, also over several calls of this program.

    Args:
        base: configuration of jobs that are forked from this process, which has imported NeMo.
        directory: where they are kept.
    """

    def __init__(self, base: LaunchConfig, directory: Path) -> None:
        self.base = base
        self._directory = directory

    def run(self, case: UsersCase) -> tuple[Path, int | None, str]:
        """Where it is, its exit code, and its last word."""
        name = "_".join([case.script.partition(".")[0], str(case.layout.world_size), *case.words])
        name = re.sub(r"[^A-Za-z0-9,=-]+", "_", f"{name}_{case.resumed}")
        directory = self._directory / name
        ended = directory / "ended.json"
        if not ended.exists():
            shutil.rmtree(directory, ignore_errors=True)
            configs = _configs(self.base, case, directory, self.checkpoint(case), faulty=False)
            (result,) = run_jobs([Job(name, configs, LIMIT_S)])
            ended.write_text(json.dumps({"code": result.code if result.in_time else None, "said": result.lines}))
        found = json.loads(ended.read_text())
        return directory, found["code"], found["said"][-1] if found["said"] else ""

    def checkpoint(self, case: UsersCase) -> Path | None:
        """What a resumed run begins at: the checkpoint of another one.

        Raises:
            RuntimeError: that one wrote none.
        """
        if not case.resumed:
            return None
        # At the end of a training the optimizer is not saved.
        features = tuple(dict.fromkeys((*case.features, "modelckpt")))
        features = tuple(name for name in features if name not in ("monitored", "earlystop"))
        before = UsersCase(0, 0, features, case.layout, (case.resumed + 2,), (), False)
        directory, code, said = self.run(before)
        found = list(directory.glob(f"nemo/**/checkpoints/users-step={case.resumed - 1}"))
        if code != 0 or not found:
            raise RuntimeError(f"the run before has no checkpoint of step {case.resumed}: {said}: {directory}")
        return found[0]


def _configs(
    base: LaunchConfig, case: UsersCase, directory: Path, checkpoint: Path | None, *, faulty: bool
) -> list[LaunchConfig]:
    nodes, spares = (case.nodes, case.spares) if faulty else (1, 0)
    meeting: dict[str, Any] = {}
    if nodes + spares > 1:
        meeting = {"rdzv_endpoint": f"127.0.0.1:{free_port()}", "token": secrets.token_hex(32)}
    hangs = any(parse(text).kind in HANGING for text in case.faults)
    resume = () if checkpoint is None else ("--resume-from", str(checkpoint))
    return [
        replace(
            base,
            nproc_per_node=case.layout.world_size // nodes,
            script=str(SCRIPTS / case.script),
            script_args=(*case.words, *resume),
            module=False,
            run_dir=directory,
            heartbeat_timeout_s=HANG_HEARTBEAT_S if hangs and faulty else HEARTBEAT_S,
            regroup_timeout_s=REGROUP_S,
            node_timeout_s=NODE_TIMEOUT_S,
            faults=case.faults if faulty else (),
            nnodes=nodes,
            node_rank=node,
            spares=spares,
            **meeting,
        )
        for node in range(nodes + spares)
    ]


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that use a core each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.send_signal(signal.SIGKILL)
            loop.wait()


def run_case(case: UsersCase, calm: Calm, directory: Path) -> Result:
    """Run it with and without faults, and say what came of it."""
    try:
        reference, code, said = calm.run(case)
        checkpoint = calm.checkpoint(case)
    except RuntimeError as error:
        return Result(Outcome.WRONG, (str(error),))
    if code != 0:
        refused = code is not None and not _has_steps(reference)
        why = f"without faults it ended with code {code}: {said}"
        return Result(Outcome.REFUSED if refused else Outcome.WRONG, (why,))
    shutil.rmtree(directory, ignore_errors=True)
    with busy_loops(LOOPS if case.busy else 0):
        configs = _configs(calm.base, case, directory, checkpoint, faulty=True)
        (ended,) = run_jobs([Job("disturbed", configs, LIMIT_S)])
    return judge(case, ended, reference)


def _has_steps(directory: Path) -> bool:
    try:
        return any(read_steps(directory).values())
    except FileNotFoundError:
        return False


# --- judging ------------------------------------------------------------------------------------------------------


def judge(case: UsersCase, ended: Ended, reference: Path) -> Result:
    """Hold a run against the undisturbed one."""
    directory, incidents = ended.run_dir, ended.incidents
    seconds = None
    if incidents and incidents[-1].end_ns is not None:
        seconds = (incidents[-1].end_ns - incidents[0].start_ns) / 1e9
    why = []
    if not ended.is_good:
        how = f"it ended with code {ended.code}" if ended.in_time else "it did not end in time"
        why.append(f"{how}: {ended.lines[-1] if ended.lines else ''}")
    else:
        why += _differences(case, directory, reference)
    why += [f"fault {text} did not happen" for text in ended.missing]
    healthy = replaced_healthy(directory, _ranks_of_living_nodes(case, directory))
    outcome = Outcome.WRONG if why else Outcome.EQUAL
    return Result(outcome, tuple(why), healthy, len(incidents), seconds, ended.seconds)


def _differences(case: UsersCase, directory: Path, reference: Path) -> list[str]:
    nproc = case.layout.world_size
    parts = set(read_ends(reference, nproc)[0]) - IN_ALL
    if len(case.steps) > 1:
        parts.discard("hooks")  # the first fit is called once more and finds nothing to do
    different = compare_ends(read_ends(reference, nproc), read_ends(directory, nproc), parts=parts)
    may_lose = "async-save" in case.features and any(
        parse(text).kind in (*DEADLY, *HANGING, *NODES) for text in case.faults
    )
    if may_lose:  # what the writer of a process that died was writing
        different = [each for each in different if not _is_loss(each)]
    found = [str(each) for each in different[:_SHOWN]]
    if len(different) > _SHOWN:
        places = Counter("/".join(each.place[:3]) for each in different)
        found.append(f"{len(different)} differences: {dict(places)}")
    if len(case.steps) == 1:
        runs = [read_steps(each) for each in (reference, directory)]
        for run in runs if may_lose else ():
            _leave_out_saves(run)  # the folders were compared above
        verdict = compare(runs[0], runs[1])
        if not verdict.equal:
            found.append(f"verify: {verdict.sentence}")
    return found


def _is_loss(difference: Difference) -> bool:
    """Whether all that is different are whole checkpoints, of which one was lost: then an older one was kept."""
    if "ModelCheckpoint" in difference.place:  # which does not count what was lost
        return True
    if difference.place != ("folders", "checkpoints"):
        return False
    unlike = set(difference.found) ^ set(difference.expected)
    return not any(name.endswith("unfinished") or name in difference.expected[-2:] for name in unlike)


def _leave_out_saves(run: Recording) -> None:
    """Have ``run`` not say which checkpoints there were, nor what the callback that saves them knew of them."""
    run.checkpoints = None
    for rank, records in run.items():
        kept = []
        for record in records:
            callbacks = {
                key: state
                for key, state in (record.callbacks or {}).items()
                if not key.startswith("ModelCheckpoint")
            }
            kept.append(structs.replace(record, callbacks=callbacks))
        run[rank] = kept


def _ranks_of_living_nodes(case: UsersCase, directory: Path) -> list[int]:
    """All ranks, but those of the second node where that was lost as a whole."""
    lost = any(parse(text).kind in NODES for text in fired(directory))
    return list(range(case.layout.world_size // case.nodes if lost else case.layout.world_size))


# --- showing ------------------------------------------------------------------------------------------------------


def markdown(results: Sequence[tuple[UsersCase, Result]]) -> str:
    """The tables: by feature, and by fault."""
    by_feature, by_fault = defaultdict(list), defaultdict(list)
    for case, result in results:
        for name in case.shown_features or ("nothing more",):
            by_feature[name].append(result)
        by_feature["*busy machine*" if case.busy else "*calm machine*"].append(result)
        by_feature[f"*{case.layout.text}{f', {case.nodes} nodes' if case.nodes > 1 else ''}*"].append(result)
        for spec in map(parse, case.faults):
            by_fault[f"`{spec.kind.value}` | {spec.phase.value}"].append(result)
    head = "cases | equal | wrong | refused | healthy replaced | median s |"
    lines = [f"| feature | {head}", "| --- | --- | --- | --- | --- | --- | --- |"]
    lines += [f"| {name} | {_row(group)} |" for name, group in sorted(by_feature.items())]
    lines += ["", f"| kind | phase | {head}", "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    lines += [f"| {name} | {_row(group)} |" for name, group in sorted(by_fault.items())]
    lines += ["", total([result for _, result in results])]
    return "\n".join(lines) + "\n"


def _row(results: Iterable[Result]) -> str:
    results = list(results)
    counts = Counter(result.outcome for result in results)
    seconds = [result.seconds for result in results if result.seconds is not None]
    cells = [len(results), *(counts[each] or "" for each in (Outcome.EQUAL, Outcome.WRONG, Outcome.REFUSED))]
    cells += [sum(len(result.healthy) for result in results) or "", ""]
    if seconds:
        cells[-1] = f"{statistics.median(seconds):.2f}"
    return " | ".join(map(str, cells))


def total(results: Sequence[Result]) -> str:
    """One line."""
    counts = Counter(result.outcome for result in results)
    healthy = sum(len(result.healthy) for result in results)
    return (
        f"{len(results)} cases: {counts[Outcome.EQUAL]} equal, {counts[Outcome.WRONG]} wrong, "
        f"{counts[Outcome.REFUSED]} refused before they started; {healthy} healthy processes replaced"
    )


def _entry(case: UsersCase, result: Result) -> dict[str, Any]:
    return {
        "seed": case.seed,
        "number": case.number,
        "case": case.text,
        **{**asdict(result), "outcome": result.outcome.value, "took_s": round(result.took_s, 1)},
    }


def _known(path: Path, seed: int) -> dict[int, Result]:
    """What an earlier call has found."""
    if not path.exists():
        return {}
    entries = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {
        entry["number"]: Result(
            Outcome(entry["outcome"]),
            tuple(entry["why"]),
            tuple(entry["healthy"]),
            entry["incidents"],
            entry["seconds"],
            entry["took_s"],
        )
        for entry in entries
        if entry["seed"] == seed
    }


def main() -> int:
    """Run the cases that have not been run, and show what came of all."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--cases", type=int, default=200, metavar="N", help="default: 200")
    options.add_argument("--seed", type=int, default=1, metavar="K", help="of the draws (default: 1)")
    options.add_argument("--case", type=int, metavar="I", help="run only that one, also if it has been run")
    options.add_argument(
        "--run-dir", type=Path, default=Path("runs/users_chaos"), metavar="D", help="goes on there"
    )
    options.add_argument("--again", action="store_true", help="run the cases again that were wrong")
    options.add_argument("--markdown", type=Path, metavar="FILE", help="where the tables go")
    args = options.parse_args()
    os.environ["PYTHONPATH"] = search_path()  # for what the scripts start
    args.run_dir = args.run_dir.resolve()
    args.run_dir.mkdir(parents=True, exist_ok=True)
    log = args.run_dir / "cases.jsonl"
    known = _known(log, args.seed)
    numbers = range(args.cases) if args.case is None else (args.case,)
    cases = [draw(args.seed, number) for number in numbers]
    about = machine(["checkpointless", "torch", "nemo_toolkit", "megatron-core"])
    progress(f"{len(cases)} cases of seed {args.seed}; faults will be injected; importing NeMo once")
    results: list[tuple[UsersCase, Result]] = []
    with interruptible():
        base = TRAINERS["nemo"].config(Task(2, 1), args.run_dir)
        calm = Calm(import_once(base, args.run_dir / "imports.txt"), args.run_dir / "calm")
        for case in cases:
            result = known.get(case.number) if args.case is None else None
            if result is None or (args.again and result.outcome is Outcome.WRONG):
                directory = args.run_dir / f"case-{args.seed}-{case.number}"
                result = run_case(case, calm, directory)
                with log.open("a") as file:
                    file.write(json.dumps(_entry(case, result)) + "\n")
                _say(case, result, directory)
                if result.outcome is Outcome.EQUAL and not result.healthy and args.case is None:
                    shutil.rmtree(directory)
            results.append((case, result))
    shown = markdown(results)
    print(f"\n{about['date']}, {about['cpu']}, {about['cores']} cores, commit {about['commit']}\n\n{shown}")
    if args.markdown is not None:
        args.markdown.write_text(shown)
    bad = [result for _, result in results if result.outcome is Outcome.WRONG or result.healthy]
    return 1 if bad else 0


def _say(case: UsersCase, result: Result, directory: Path) -> None:
    seconds = "" if result.seconds is None else f", {result.seconds:.1f} s"
    progress(f"case {case.number}: {case.text}")
    print(f"    {result.outcome.value}: {result.incidents} incidents{seconds}, took {result.took_s:.0f} s")
    for line in result.why:
        print(f"    {line}")
    if result.healthy:
        print(f"    HEALTHY PROCESSES REPLACED: {', '.join(result.healthy)}")
    if result.outcome is Outcome.WRONG or result.healthy:
        print(f"    its logs: {directory}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
