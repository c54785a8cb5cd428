"""Who waits for whom, by how many collectives each rank has launched in each of its process groups.

Where launches return before the peers have come, as on GPUs, a rank that waits for a peer may stand anywhere: where
it reads a loss, where it synchronises, or in the middle of a backward pass. Its stack says nothing then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from checkpointless.launcher.coordinator.hangs.policy import Stance

Launched = Mapping[int, Mapping[str, int]]  # for each rank, the number of collectives in each of its groups


@dataclass(frozen=True)
class Whereabouts:
    """A rank's answer to an inquiry.

    Attributes:
        in_collective: whether its main thread waits in a collective.
        stack: the main thread's stack as text.
        is_async: whether collectives return when they have been launched, before the peers have come.
        launched: how many collectives it has launched in each of its process groups.
    """

    in_collective: bool
    stack: str
    is_async: bool = False
    launched: Mapping[str, int] = field(default_factory=dict)


def ahead(launched: Launched) -> frozenset[int]:
    """Return the ranks that have launched a collective to which another rank of its group has not come."""
    least: dict[str, int] = {}
    for groups in launched.values():
        for group, count in groups.items():
            least[group] = min(count, least.get(group, count))
    return frozenset(
        rank for rank, groups in launched.items() if any(count > least[group] for group, count in groups.items())
    )


def behind(launched: Launched) -> frozenset[int]:
    """Return the ranks that others wait for and that wait for nobody."""
    most: dict[str, int] = {}
    for groups in launched.values():
        for group, count in groups.items():
            most[group] = max(count, most.get(group, count))
    late = {
        rank for rank, groups in launched.items() if any(count < most[group] for group, count in groups.items())
    }
    return frozenset(late - ahead(launched))


def stances_of(answers: Mapping[int, Whereabouts], is_complete: bool) -> dict[int, Stance]:
    """Return where each rank stands that has answered.

    The stack of a rank whose launches return at once tells nothing. It waits if it is ahead of a peer; it holds the
    others up if it alone is behind. If several are, they may wait for each other in a way that nobody counts. If
    not all have answered, whoever is behind may be ahead of one that has not.

    Args:
        answers: by rank.
        is_complete: whether every rank that is in its block has answered.
    """
    launched = {rank: answer.launched for rank, answer in answers.items()}
    waiting, late = ahead(launched), behind(launched)
    found = {}
    for rank, answer in answers.items():
        if answer.in_collective or (answer.is_async and rank in waiting):
            found[rank] = Stance.WAITS
        elif answer.is_async and not (is_complete and late == {rank}):
            found[rank] = Stance.UNCLEAR
        else:
            found[rank] = Stance.ELSEWHERE
    return found
