"""How long the decision takes, by the number of ranks: `python benchmarks/decide/run.py --json results.json`."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from itertools import pairwise, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import interruptible, machine, progress, spread
from checkpointless.recovery.decide import Decision, RankReport, Verdict, decide

RANKS = (1_000, 10_000, 100_000)
GROUPS = (2, 8, 1_000)
LIMIT_S = 1.0
STEP = 7
# A job whose groups name more ranks than this, once for each member, is left out: its reports take minutes to make.
MOST_NAMES = 10_000_000


class Case(Enum):
    """What happened to the job."""

    ONE_DEAD = "one rank dead"
    PERCENT_DEAD = "1 % of the ranks dead"
    APART = "every second rank a step ahead"
    EQUAL = "one rank dead, all digests equal"
    ODD = "one digest odd"
    LOST = "all holders of one shard dead"
    SPLIT = "one shard a step behind for good"


# What groups as large as this are for: plain data parallelism.
OF_LARGE_GROUPS = (Case.ONE_DEAD, Case.PERCENT_DEAD)


@dataclass(frozen=True)
class Timing:
    """One decision.

    Attributes:
        read_s: to make the reports from the JSON in which they travel.
        decide_s: to decide.
        decide_cpu_s: the same in time of the processor, without what others take of it.
    """

    case: str
    ranks: int
    group: int
    verdict: str
    read_s: float
    decide_s: float
    decide_cpu_s: float


def answers_of(case: Case, ranks: int, group: int) -> list[dict[str, Any]]:
    """What the ranks tell each other, where the replicas of a shard lie as far apart as they can.

    Args:
        case: what happened.
        ranks: of the job, a multiple of ``group``.
        group: replicas of each shard.
    """
    shards = ranks // group
    groups = [tuple(range(shard, ranks, shards)) for shard in range(shards)]
    made = [RankReport(rank, STEP, False, False, (groups[rank % shards],)) for rank in range(ranks)]
    if case in (Case.EQUAL, Case.ODD):
        made = [replace(each, digests=(f"{each.rank % shards:032x}",)) for each in made]
    if case in (Case.ONE_DEAD, Case.EQUAL):
        made[0] = replace(made[0], committed=None, digests=())
    if case is Case.PERCENT_DEAD:
        made[: ranks // 100] = [replace(each, committed=None) for each in made[: ranks // 100]]
    if case is Case.APART:
        made[::2] = [replace(each, committed=STEP + 1) for each in made[::2]]
        made[1::2] = [replace(each, ready=True) for each in made[1::2]]
    if case is Case.ODD:
        made[0] = replace(made[0], digests=("f" * 32,))
    if case in (Case.LOST, Case.SPLIT):
        left = None if case is Case.LOST else STEP - 1
        made[shards - 1 :: shards] = [replace(each, committed=left) for each in made[shards - 1 :: shards]]
    return [{"report": each.to_json(), "keeps": []} for each in made]


def check(decision: Decision, case: Case, ranks: int, group: int) -> None:
    """A decision that is wrong is not worth timing.

    Raises:
        RuntimeError: it is.
    """
    refused = case in (Case.LOST, Case.SPLIT) or (case is Case.ODD and group == 2)
    expected = (
        Verdict.REFUSE if refused else Verdict.RESUME,
        None if refused else STEP + (case is Case.APART),
        ranks // 2 if case is Case.APART else 0,
        0 if refused or case is Case.APART else ranks // 100 if case is Case.PERCENT_DEAD else 1,
    )
    found = (decision.verdict, decision.target, len(decision.redo), len(decision.refills))
    if found != expected:
        raise RuntimeError(f"{case.value}, {ranks} ranks: decided {found}, expected {expected}")


def measure(text: str, case: Case, ranks: int, group: int) -> Timing:
    """Read the reports as a recovery does, and decide."""
    began_s = time.perf_counter()
    reports = RankReport.gathered(json.loads(text), 0)
    read_s, read_cpu_s = time.perf_counter(), time.thread_time()
    decision = decide(reports, STEP + (case is Case.APART))
    decided_s, decided_cpu_s = time.perf_counter(), time.thread_time()
    check(decision, case, ranks, group)
    return Timing(
        case=case.value,
        ranks=ranks,
        group=group,
        verdict=decision.verdict.value,
        read_s=read_s - began_s,
        decide_s=decided_s - read_s,
        decide_cpu_s=decided_cpu_s - read_cpu_s,
    )


def main() -> None:
    """Time every case at every size, the sizes in turn, and show the table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--repeats", type=int, default=9, metavar="N", help="per case and size (default: 9)")
    options.add_argument("--json", type=Path, metavar="FILE", help="where the results go (default: only shown)")
    options.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=RANKS,
        metavar="N",
        help=f"sizes of the job (default: {_list(RANKS)})",
    )
    options.add_argument(
        "--group",
        type=int,
        nargs="+",
        default=GROUPS,
        metavar="N",
        help=f"replicas per shard (default: {_list(GROUPS)})",
    )
    args = options.parse_args()
    sizes = [(ranks, group) for ranks, group in product(args.ranks, args.group) if ranks * group <= MOST_NAMES]
    for ranks, group in sizes:
        if ranks < 100 or group < 2 or ranks % 2 or ranks % group:
            options.error(f"{ranks} ranks in groups of {group}: at least 100, even, and a multiple of the group")
    about = machine(["checkpointless"])
    timings: list[Timing] = []
    with interruptible():
        for group, case in product(args.group, Case):
            if group > 100 and case not in OF_LARGE_GROUPS:
                continue
            texts = {ranks: json.dumps(answers_of(case, ranks, group)) for ranks, size in sizes if size == group}
            for _, (ranks, text) in product(range(args.repeats), texts.items()):
                gc.collect()
                timings.append(measure(text, case, ranks, group))
            progress(f"groups of {group}, {case.value}: {', '.join(f'{ranks:,}' for ranks in texts)} ranks")
    _report(timings, about, args.json)


def _report(timings: list[Timing], about: dict[str, Any], path: Path | None) -> None:
    groups: dict[tuple[int, str], dict[int, list[Timing]]] = defaultdict(lambda: defaultdict(list))
    for timing in timings:
        groups[timing.group, timing.case][timing.ranks].append(timing)
    sizes = sorted({timing.ranks for timing in timings})
    steps = list(pairwise(sizes))
    heads = ["replicas", "case", "verdict", *(f"{size:,} ranks, ms: median (to most)" for size in sizes)]
    heads += [f"per rank, {later:,} : {earlier:,}" for earlier, later in steps]
    heads += ["deciding : reading the reports"]
    print("\n| " + " | ".join(heads) + " |")
    print("| " + " | ".join(["---"] * len(heads)) + " |")
    summary = []
    for (group, case), by_size in groups.items():
        wall = {size: spread([each.decide_s for each in made]) for size, made in by_size.items()}
        cpu = {size: spread([each.decide_cpu_s for each in made]) for size, made in by_size.items()}
        read = {size: spread([each.read_s for each in made]) for size, made in by_size.items()}
        per_rank = {size: figures["median"] / size for size, figures in cpu.items()}
        ratios = {
            f"{later}:{earlier}": per_rank[later] / per_rank[earlier]
            for earlier, later in steps
            if later in per_rank and earlier in per_rank
        }
        largest = max(by_size)
        verdict = by_size[largest][0].verdict
        cells = [
            f"{1e3 * wall[size]['median']:.2f} (to {1e3 * wall[size]['max']:.2f})" if size in wall else "-"
            for size in sizes
        ]
        found = [ratios.get(f"{later}:{earlier}") for earlier, later in steps]
        cells += [f"{ratio:.2f}" if ratio is not None else "-" for ratio in found]
        cells.append(f"{wall[largest]['median'] / read[largest]['median']:.2f}")
        print(f"| {group:,} | {case} | {verdict} | " + " | ".join(cells) + " |")
        entry: dict[str, Any] = {"group": group, "case": case, "verdict": verdict, "per_rank_ratios": ratios}
        summary.append({**entry, "decide_s": wall, "decide_cpu_s": cpu, "read_s": read})
    slowest = max(timings, key=lambda timing: timing.decide_s)
    print(
        f"\nslowest of all: {slowest.decide_s:.3f} s, {slowest.ranks:,} ranks in groups of {slowest.group:,}, "
        f"{slowest.case}; the limit of {LIMIT_S:g} s is {'kept' if slowest.decide_s < LIMIT_S else 'BROKEN'}"
    )
    if path is not None:
        results = {"machine": about, "summary": summary, "runs": [asdict(each) for each in timings]}
        path.write_text(json.dumps(results, indent=1) + "\n")


def _list(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


if __name__ == "__main__":
    main()
