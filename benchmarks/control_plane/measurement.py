"""What a run of the control plane measures, and how it is told: as a table, and as JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import spread

LIMIT_S = 1.0


class Case(Enum):
    """What happens to the job, in this order."""

    START = "start"
    STEADY = "one second of training"
    RAISES = "one rank raises"
    STORM = "one rank raises, all others a broken collective"
    DIES = "one rank's process dies"
    HANGS = "one rank hangs, all others wait for it"
    NODE = "one node lost, a spare takes its place"
    TAKEOVER = "the coordinator lost, a new one takes over"


@dataclass
class Measurement:
    """What one case took.

    Attributes:
        heard: messages to the coordinator.
        heard_bytes: likewise.
        sent: messages from it.
        sent_bytes: likewise.
        by_type: messages of each type, both ways.
        cpu_s: of the coordinator: decode, hear, encode.
        told_s: of its clock, from what told of the fault to the last node's interrupt (None: no fault).
        regrouped_s: from there to the last node's begin (None: the generation goes on).
    """

    case: str
    ranks: int
    heard: int = 0
    heard_bytes: int = 0
    sent: int = 0
    sent_bytes: int = 0
    by_type: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0
    told_s: float | None = None
    regrouped_s: float | None = None

    def count(self, message: Any) -> None:
        """One more of this type."""
        self.by_type[message.type] = self.by_type.get(message.type, 0) + 1


def report(
    measurements: list[Measurement],
    socket_us: dict[str, dict[str, float]],
    about: dict[str, Any],
    path: Path | None,
) -> None:
    """Print what was measured.

    Args:
        measurements: of all cases, sizes and repeats.
        socket_us: what one message costs over a socket, in us.
        about: the machine.
        path: where it goes as JSON; None: nowhere.
    """
    groups: dict[tuple[str, int], list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        groups[measurement.case, measurement.ranks].append(measurement)
    sizes = sorted({ranks for _, ranks in groups})
    cpu = {key: spread([each.cpu_s for each in made]) for key, made in groups.items()}
    heads = ["case", "ranks", "messages in / out", "KB in / out", "processor, ms: median (to most)"]
    heads += [
        "processor per rank, us",
        "known everywhere, ms: median (to most)",
        "then begun, ms: median (to most)",
    ]
    print("\n| " + " | ".join(heads) + " |")
    print("| " + " | ".join(["---"] * len(heads)) + " |")
    summary = []
    for (case, ranks), made in sorted(groups.items(), key=lambda item: [c.value for c in Case].index(item[0][0])):
        first = made[0]
        told = _spread([each.told_s for each in made])
        regrouped = _spread([each.regrouped_s for each in made])
        cells = [
            case,
            f"{ranks:,}",
            f"{first.heard:,} / {first.sent:,}",
            f"{first.heard_bytes / 1e3:,.0f} / {first.sent_bytes / 1e3:,.0f}",
            _ms(cpu[case, ranks]),
            f"{1e6 * cpu[case, ranks]['median'] / ranks:.1f}",
            _ms(told),
            _ms(regrouped),
        ]
        print("| " + " | ".join(cells) + " |")
        ratios = {
            f"{ranks}:{earlier}": cpu[case, ranks]["median"] / ranks / (cpu[case, earlier]["median"] / earlier)
            for earlier, later in pairwise(sizes)
            if later == ranks
        }
        entry: dict[str, Any] = {"case": case, "ranks": ranks, "per_rank_ratio": ratios}
        summary.append({**entry, "cpu_s": cpu[case, ranks], "told_s": told, "regrouped_s": regrouped})
    shown = ", ".join(f"{name} {figures['median']:.1f}" for name, figures in socket_us.items())
    print(f"\none message, us of processor time (send and receive: a channel's, with the system calls): {shown}")
    faults = [(each.told_s, each) for each in measurements if each.told_s is not None]
    if faults:
        slowest_s, slowest = max(faults, key=lambda fault: fault[0])
        print(
            f"\nslowest to be known everywhere: {slowest_s:.3f} s, {slowest.ranks:,} ranks, {slowest.case}; "
            f"the limit of {LIMIT_S:g} s is {'kept' if slowest_s < LIMIT_S else 'BROKEN'}"
        )
    if path is not None:
        runs = [asdict(each) for each in measurements]
        results = {"machine": about, "summary": summary, "socket_us": socket_us, "runs": runs}
        path.write_text(json.dumps(results, indent=1) + "\n")


def _spread(values: list[float | None]) -> dict[str, float] | None:
    there = [value for value in values if value is not None]
    return spread(there) if there else None


def _ms(figures: dict[str, float] | None) -> str:
    return f"{1e3 * figures['median']:.1f} ({1e3 * figures['max']:.1f})" if figures is not None else "-"
