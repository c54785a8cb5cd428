"""What a check found, and how findings of several checks are put together."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum

from checkpointless.observability.telemetry import wording

JSON_FORMAT = 2  # of what :func:`as_json` gives; raised when a reader of the former cannot read the next
LONGEST = 400  # characters of a text from outside


class Severity(Enum):
    """How much a finding matters; the worst comes first."""

    ERROR = "error"  # the job does not run, or does not recover
    WARNING = "warning"  # it runs, and some recovery is lost or takes much longer
    ADVICE = "advice"  # it could be better
    OK = "ok"  # nothing has to be changed


class Family(Enum):
    """What a check is about, in the order in which findings are shown."""

    VERSIONS = "versions"
    VARIABLES = "variables"
    FORKING = "forking"
    STORAGE = "storage"
    LIMITS = "limits"


_SEVERITIES, _FAMILIES = list(Severity), list(Family)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; ``todo`` is "" if nothing has to be changed."""

    family: Family
    severity: Severity
    seen: str
    source: str = ""
    todo: str = ""

    @property
    def is_to_change(self) -> bool:
        return self.severity in (Severity.ERROR, Severity.WARNING)

    @property
    def headline(self) -> str:
        """The finding in one line, for a terminal that shows other lines, too."""
        todo = f": {self.todo}" if self.todo else ""
        return wording.printable(f"{self.severity.value}: {self.seen}{todo}", 2 * LONGEST)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings in the order in which they are shown: by severity, then by family."""
    return sorted(findings, key=lambda each: (_SEVERITIES.index(each.severity), _FAMILIES.index(each.family)))


def as_json(findings: Iterable[Finding]) -> str:
    """Return the findings as a JSON document, worst first."""
    rows = [
        {**asdict(each), "family": each.family.value, "severity": each.severity.value}
        for each in worst_first(findings)
    ]
    worst = rows[0]["severity"] if rows else Severity.OK.value
    return json.dumps({"format": JSON_FORMAT, "worst": worst, "findings": rows}, indent=1)
