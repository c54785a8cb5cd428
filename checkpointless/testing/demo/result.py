"""The result of the demo: what its two runs recorded, and whether they agree."""

from __future__ import annotations

from dataclasses import dataclass

from checkpointless.observability.report.incidents import IncidentSummary
from checkpointless.observability.report.verify import Steps, Verdict


@dataclass(frozen=True)
class DemoResult:
    """Result of both runs.

    Attributes:
        verdict: comparison of what the two runs recorded.
        undisturbed: steps of the run without faults.
        disturbed: steps of the run with faults.
        incidents: incidents of the run with faults.
        not_fired: specs of faults that never happened, or not as often as they should.
        complete: whether every step that was asked for was recorded on every rank.
    """

    verdict: Verdict
    undisturbed: Steps
    disturbed: Steps
    incidents: list[IncidentSummary]
    not_fired: tuple[str, ...]
    complete: bool

    @property
    def passed(self) -> bool:
        """Whether losses and parameters are bit-identical and every fault happened."""
        return self.verdict.equal and self.complete and not self.not_fired
