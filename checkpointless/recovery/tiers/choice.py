"""Which copies a recovery is made of: a pure function of what the ranks say that they have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from checkpointless.local_checkpoint.part_id import PartId, SaveId
from checkpointless.telemetry.event_names import LIVING


@dataclass(frozen=True)
class Holding:
    """What one rank has.

    Attributes:
        living: the save that the state in which the rank lives is equal to; None: it has none.
        parts: by tier, the parts that the rank can read, its own and others'.
    """

    living: SaveId | None = None
    parts: Mapping[str, Collection[PartId]] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Copy:
    """One copy of one rank's state.

    Attributes:
        tier: the name of its tier, or :data:`~checkpointless.telemetry.event_names.LIVING`.
        holder: the rank that can read it.
        part: which save, and whose state.
    """

    tier: str
    holder: int
    part: PartId


@dataclass(frozen=True)
class Choice:
    """What a recovery is made of.

    Attributes:
        save: the save; None: there is none of which every rank's part exists.
        copies: by rank, the copy that it is filled from.
        reason: why there is none, in words ("" otherwise).
    """

    save: SaveId | None = None
    copies: tuple[Copy, ...] = ()
    reason: str = ""


def choose(
    holdings: Sequence[Holding],
    tiers: Sequence[str],
    is_of_this_training: Callable[[SaveId], bool],
    unusable: Collection[Copy] = (),
) -> Choice:
    """Choose the newest save of which every rank's part exists, and for each rank the cheapest copy.

    A copy that the rank itself can read is better than another one of the same tier; among those of others, ranks
    take turns.

    Args:
        holdings: what each rank has, in the order of the ranks.
        tiers: the names of the tiers, the cheapest first.
        is_of_this_training: returns whether the training comes from the state of a save.
        unusable: copies that turned out to be damaged or gone.
    """
    copies = _by_save(holdings, tiers, unusable)
    missing: dict[SaveId, list[int]] = {}
    for save in sorted(copies, reverse=True):
        if not is_of_this_training(save):
            continue
        lacking = [rank for rank in range(len(holdings)) if not copies[save].get(rank)]
        if not lacking:
            return Choice(save, _shared_out(copies[save], tiers))
        missing[save] = lacking
    return Choice(reason=_why(missing, tiers))


def _by_save(
    holdings: Sequence[Holding], tiers: Sequence[str], unusable: Collection[Copy]
) -> dict[SaveId, dict[int, list[Copy]]]:
    """Return all usable copies, by save and by the rank whose state they are."""
    found: dict[SaveId, dict[int, list[Copy]]] = defaultdict(lambda: defaultdict(list))
    for holder, holding in enumerate(holdings):
        if holding.living is not None:
            part = PartId(holding.living, holder)
            found[holding.living][holder].append(Copy(LIVING, holder, part))
        for tier in tiers:
            for part in holding.parts.get(tier, ()):
                copy = Copy(tier, holder, part)
                if copy not in unusable and part.part < len(holdings):
                    found[part.save][part.part].append(copy)
    return found


def _shared_out(copies: Mapping[int, Sequence[Copy]], tiers: Sequence[str]) -> tuple[Copy, ...]:
    """Return a copy for each rank, so that no holder has to send much more than another."""
    order = {name: place for place, name in enumerate([LIVING, *tiers])}
    duties: dict[int, int] = defaultdict(int)
    chosen = []
    for rank in sorted(copies):

        def price(copy: Copy, rank: int = rank) -> tuple[int, bool, int, int]:
            return order[copy.tier], copy.holder != rank, duties[copy.holder], copy.holder

        best = min(copies[rank], key=price)
        duties[best.holder] += best.holder != rank
        chosen.append(best)
    return tuple(chosen)


def _why(missing: Mapping[SaveId, Sequence[int]], tiers: Sequence[str]) -> str:
    names = ", ".join(tiers)
    if not missing:
        return f"no tier ({names}) has a copy of the state"
    save, ranks = next(iter(missing.items()))
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} ranks)" if len(ranks) > 8 else "")
    return f"no tier ({names}) has the state of rank{'s' * (len(ranks) > 1)} {shown} after step {save.iteration}"
