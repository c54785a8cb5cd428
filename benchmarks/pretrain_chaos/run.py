"""Drawn faults in Megatron's `pretrain`: `.venv-bridge312/bin/python benchmarks/pretrain_chaos/run.py --jobs 10`.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import ROOT, folder_of_runs, interruptible, machine, progress
from checkpointless.faults.ledger import fired
from checkpointless.observability.report.verify import compare
from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import RankFailure, Zygote

SCRIPTS = ROOT / "tests" / "bridge" / "scripts"
KINDS = ("exception", "sigkill")
PHASES = ("data", "forward", "backward", "sync", "before_optimizer", "optimizer", "after_optimizer", "between")
RANKS, FAULTS, FIRST, GAP = 4, 5, 6, 2
STEPS = FIRST + GAP * FAULTS + 2
LIMIT_S = 300.0


@dataclass(frozen=True)
class Trainer:
    """How the script of a trainer is called.

    Attributes:
        script: below ``SCRIPTS``.
        modules: what its ranks import.
        common: its arguments; ``{saved}`` is the folder of its saves.
        layouts: further arguments of each layout, by name.
        places: in which calls of Megatron a job breaks once, with the number of the second such call.
        breaks: the argument for that.
    """

    script: str
    modules: tuple[str, ...]
    common: str
    layouts: dict[str, str]
    places: dict[str, int]
    breaks: str


TRAINERS = {
    "bridge": Trainer(
        "train.py",
        ("checkpointless.integrations.megatron_bridge",),
        f"{STEPS} evaluate=2 save={{saved}}",
        {"dp=4": "", "tp=2 dp=2": "tp=2"},
        {"eval": 4, "save": 4, "saved": 4},
        "break=",
    ),
    "megatron-lm": Trainer(
        "megatron_lm.py",
        ("checkpointless.megatron.pretrain", "tests.ranks.jobs"),
        f"--train-iters {STEPS} --eval-interval 2 --save-interval 2 --save {{saved}} "
        "--num-distributed-optimizer-instances 2",
        {"dp=4": "", "tp=2 dp=2": "--tensor-model-parallel-size 2"},
        {"evaluate": 2, "save_checkpoint": 2},
        "--break=",
    ),
}


@dataclass(frozen=True)
class Case:
    """One job: a fault in a validation or a save, and then faults in drawn phases, steps and ranks."""

    trainer: str
    number: int
    layout: str
    breaks: str
    faults: tuple[str, ...]

    @property
    def causes(self) -> list[tuple[str, str]]:
        """Kind and place of each fault."""
        where, kind = self.breaks.split(":")[:2]
        return [(kind, f"in `{where}`"), *((kind, rest.split(":")[0]) for kind, _, rest in self._parted)]

    @property
    def _parted(self) -> list[tuple[str, str, str]]:
        return [text.partition("@") for text in self.faults]


@dataclass(frozen=True)
class Result:
    """What came of a job; ``wrong`` is empty if all is as without faults."""

    wrong: str
    seconds: list[float]
    took_s: float


def draw(trainer: str, seed: int, number: int) -> Case:
    """Return the job with a number. It depends on nothing else."""
    about = TRAINERS[trainer]
    dice = random.Random(f"{trainer}/{seed}/{number}")
    where = dice.choice(sorted(about.places))
    breaks = f"{where}:{dice.choice(KINDS)}:{dice.randrange(RANKS)}:{about.places[where]}"
    faults = tuple(
        f"{dice.choice(KINDS)}@{dice.choice(PHASES)}:rank={dice.randrange(RANKS)},step={step + dice.randrange(GAP)}"
        for step in range(FIRST, FIRST + GAP * FAULTS, GAP)
    )
    return Case(trainer, number, list(about.layouts)[number % len(about.layouts)], breaks, faults)


def saved(job: Job) -> set[str]:
    """The names of the files of all saves."""
    folder = job.run_dir.parent / "saved"
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def run(case: Case, zygote: Zygote, folder: Path, *, is_calm: bool = False) -> Job:
    """Train to the end, with or without the faults.

    Raises:
        RankFailure: the job did not end in time.
    """
    about = TRAINERS[case.trainer]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    saves = folder.parent / "saved"  # the same in all jobs, as saves contain their own place
    shutil.rmtree(saves, ignore_errors=True)
    words = f"{about.common} {about.layouts[case.layout]}".format(saved=saves).split()
    args = (*words, *([] if is_calm else [about.breaks + case.breaks]))
    script, faults = str(SCRIPTS / about.script), () if is_calm else case.faults
    job = run_job(
        zygote, folder / "run", RANKS, script=script, args=args, faults=faults, limit_s=LIMIT_S, code=None
    )
    saves.rename(folder / "saved")
    return job


def judge(case: Case, job: Job, calm: Job, took_s: float) -> Result:
    """Hold a job against the one without faults: every step, what is saved, and that each fault happened."""
    incidents = job.incidents
    verdict = compare(calm.steps, job.steps)
    different = sorted(saved(job) ^ saved(calm))
    wrong = [
        (job.code != 0, f"exit code {job.code}: {job.said[-1] if job.said else ''}"),
        (not verdict.equal or verdict.steps != STEPS, f"{verdict.sentence} ({verdict.steps} steps)"),
        (bool(different), f"saved otherwise: {different[:4]}"),
        (fired(job.run_dir) != dict.fromkeys(case.faults, 1), f"happened: {fired(job.run_dir)}"),
        (len(incidents) != 1 + len(case.faults), f"{len(incidents)} incidents"),
        (any(each.inexact for each in incidents), "a recovery was not exact"),
        (any(each.steps_lost for each in incidents), "steps were lost"),
    ]
    seconds = [each.headline_s for each in incidents if each.headline_s is not None]
    return Result("; ".join(why for is_wrong, why in wrong if is_wrong), seconds, took_s)


def tables(results: Sequence[tuple[Case, Result]]) -> str:
    """The table by place and kind, and the sum."""
    counts: dict[tuple[str, str, str], int] = defaultdict(int)
    wrong: dict[tuple[str, str, str], int] = defaultdict(int)
    for case, result in results:
        for kind, place in case.causes:
            for layout in (case.layout, "all"):
                counts[place, kind, layout] += 1
                wrong[place, kind, layout] += bool(result.wrong)
    layouts = [*dict.fromkeys(case.layout for case, _ in results), "all"]
    lines = [f"| place | kind | {' | '.join(layouts)} | wrong |", "| --- " * (len(layouts) + 3) + "|"]
    for place, kind in sorted({key[:2] for key in counts}):
        cells = [str(counts[place, kind, layout] or "") for layout in layouts]
        lines.append(f"| {place} | {kind} | {' | '.join(cells)} | {wrong[place, kind, 'all'] or 0} |")
    seconds = [each for _, result in results for each in result.seconds]
    faults = sum(len(case.causes) for case, _ in results)
    bad = sum(len(case.causes) for case, result in results if result.wrong)
    lines += ["", f"{faults} faults in {len(results)} jobs, {bad} in jobs with a wrong result; "]
    if seconds:
        lines[-1] += f"from a fault to the next step {statistics.median(seconds):.2f} s (median)"
    return "\n".join(lines)


def main() -> int:
    """Run the jobs of a trainer, and show what came of them."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--trainer", choices=sorted(TRAINERS), default="bridge", help="default: bridge")
    options.add_argument("--jobs", type=int, default=10, metavar="N", help="with six faults each (default: 10)")
    options.add_argument("--seed", type=int, default=1, metavar="K", help="of the draws (default: 1)")
    options.add_argument("--job", type=int, action="append", metavar="I", help="run only this one; may be repeated")
    options.add_argument("--keep", type=Path, metavar="DIR", help="keep the jobs' logs and events here")
    options.add_argument("--json", type=Path, metavar="FILE", help="where the results go (default: only shown)")
    args = options.parse_args()
    numbers = args.job or range(args.jobs)
    cases = [draw(args.trainer, args.seed, number) for number in numbers]
    results: list[tuple[Case, Result]] = []
    about = machine(["checkpointless", "torch", "megatron-core", "megatron-bridge"])
    with interruptible(), folder_of_runs(args.keep, "pretrain-chaos-") as folder:
        for result in run_all(cases, folder):
            results.append(result)
            if args.json is not None:  # in time for a benchmark that is cut short
                rows: list[dict[str, Any]] = [{**asdict(case), **asdict(came)} for case, came in results]
                args.json.write_text(
                    json.dumps({"machine": about, "seed": args.seed, "jobs": rows}, indent=1) + "\n"
                )
    print(f"\n{about['date']}, {about['cores']} cores, {about['versions']}, commit {about['commit']}\n")
    print(tables(results))
    return int(any(result.wrong for _, result in results))


def run_all(cases: Sequence[Case], folder: Path) -> Iterator[tuple[Case, Result]]:
    """Run the jobs of one trainer, and before them each layout without faults."""
    zygote = Zygote(TRAINERS[cases[0].trainer].modules)
    calm: dict[str, Job] = {}
    try:
        for case in cases:
            if case.layout not in calm:
                progress(f"{case.layout}: without faults")
                place = folder / f"calm-{case.layout.replace(' ', '-')}"
                calm[case.layout] = run(case, zygote, place, is_calm=True)
            yield case, attempt(case, zygote, folder / f"job-{case.number}", calm[case.layout])
    finally:
        zygote.close()


def attempt(case: Case, zygote: Zygote, folder: Path, calm: Job) -> Result:
    """Run a job with its faults, judge it and say so; its files go unless it is wrong."""
    progress(f"job {case.number}: {case.layout}, {case.breaks}, {', '.join(case.faults)}")
    began_s = time.monotonic()
    try:
        job = run(case, zygote, folder)
        result = judge(case, job, calm, time.monotonic() - began_s)
    except RankFailure as error:
        result = Result(str(error), [], time.monotonic() - began_s)
    print(f"    {result.wrong or 'equal'}, took {result.took_s:.0f} s", flush=True)
    if not result.wrong:
        shutil.rmtree(folder)
    return result


if __name__ == "__main__":
    sys.exit(main())
