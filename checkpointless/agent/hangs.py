"""Finding ranks that make no progress, and telling who hangs from who merely waits for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ANSWER_TIMEOUT_S = 0.8  # so that a hang is found within the limit and one second
NEARLY = 0.9  # ranks that wait for a stalled one stopped about when it did


@dataclass
class Inquiry:
    """A question that is out.

    Attributes:
        stalled: the ranks that were asked, with the beat that they were stuck at.
        in_collective: what they answered so far.
    """

    id: int
    asked_at_s: float
    stalled: dict[int, int]
    in_collective: dict[int, bool] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)

    def is_over(self, now_s: float) -> bool:
        """Whether all have answered, or had the time to."""
        return len(self.in_collective) == len(self.stalled) or now_s - self.asked_at_s >= ANSWER_TIMEOUT_S


@dataclass(frozen=True)
class Verdict:
    """What an inquiry came to.

    Attributes:
        culprits: ranks that hang, and must be replaced.
        everybody_waits: no rank hangs by itself, but all wait for each other.
    """

    culprits: tuple[int, ...]
    everybody_waits: bool


def stalled(ages_s: Mapping[int, float], timeout_s: float) -> tuple[int, ...]:
    """The ranks to be asked: nobody while every rank shows progress within ``timeout_s``.

    Args:
        ages_s: seconds since each running rank showed progress last.
    """
    if not ages_s or max(ages_s.values()) < timeout_s:
        return ()
    return tuple(sorted(rank for rank, age_s in ages_s.items() if age_s >= NEARLY * timeout_s))


def judge(inquiry: Inquiry, beats: Mapping[int, int], ages_s: Mapping[int, float], timeout_s: float) -> Verdict:
    """Who hangs: who does not answer, or answers from outside a collective. The others are victims.

    Victims alone are no reason to act while a rank that they may be waiting for still shows progress, unless
    that goes on for twice the limit.

    Args:
        beats: the beat of each running rank now; one that moved on since it was asked is left alone.
        ages_s: as for :func:`stalled`.
    """
    still = [rank for rank, beat in inquiry.stalled.items() if beats.get(rank) == beat]
    culprits = tuple(rank for rank in still if not inquiry.in_collective.get(rank, False))
    everybody = len(still) == len(ages_s) or any(ages_s[rank] >= 2 * timeout_s for rank in still)
    return Verdict(culprits, bool(still) and not culprits and everybody)
