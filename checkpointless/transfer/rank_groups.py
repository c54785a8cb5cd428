"""Groups of ranks that hold the same tensors: whether the ranks agree on them, and how they travel in few bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checkpointless.launcher.protocol.causes import Json, Parsed

Group = tuple[int, ...]  # global ranks in ascending order


def all_groups(parts: Mapping[int, Sequence[Group]]) -> list[Group]:
    """Return all groups of ``parts`` by rank, ascending; ``ValueError`` if a rank is in none or ranks contradict.

    It takes time linear in the members of all groups; groups that are one object are compared fastest.
    """
    number_of: dict[int, int] = {}  # by the identity of the tuple, which is cheaper than its hash
    numbers: dict[Group, int] = {}
    tellers: dict[int, list[int]] = defaultdict(list)
    for rank, mine in parts.items():
        if not mine:
            raise ValueError(f"rank {rank} is in no replica group")
        for group in mine:
            number = number_of.get(id(group))
            if number is None:
                number = number_of[id(group)] = numbers.setdefault(group, len(numbers))
            tellers[number].append(rank)
    for group, number in numbers.items():
        told = sorted(tellers[number])
        if told != list(group):
            rank = min({*told} ^ {*group}, default=min(told))
            raise ValueError(
                f"the ranks contradict each other about the replica groups: of ranks {names(group)}, rank {rank} "
                "says something else"
            )
    return sorted(numbers)


def names(ranks: Sequence[int]) -> str:
    """Return ``ranks`` in words, the first eight of many."""
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ... ({len(ranks)} ranks)" if len(ranks) > 8 else shown


def compact(group: Group) -> Json:
    """Return ``group`` as plain data: its ranks or, if shorter, a grid: the first, and step and count by axis."""
    dimensions: list[list[int]] = []
    left = group
    while len(left) > 1:
        step, count = left[1] - left[0], 2
        while count < len(left) and left[count] == left[0] + count * step:
            count += 1
        if len(left) % count:
            return list(group)
        dimensions.append([step, count])
        left = left[::count]
    grid: Json = {"first": group[0], "by": [list(each) for each in dimensions]} if group else []
    return (
        grid if 2 * len(dimensions) + 1 < len(group) and _ranks_of(group[0], dimensions) == group else list(group)
    )


def expanded(told: Sequence[Iterable[Parsed]]) -> dict[int, tuple[Group, ...]]:
    """Return the groups of each rank, in whose order they were told, which :func:`compact` made plain data of.

    Equal groups become one object; ``ValueError`` if one has more members than there are ranks.
    """
    known: dict[str, Group] = {}

    def group_of(told_group: Parsed) -> Group:
        name = repr(told_group)
        if name not in known:
            is_grid = isinstance(told_group, dict)
            size = math.prod(count for _, count in told_group["by"]) if is_grid else len(told_group)
            if size > len(told):
                raise ValueError(f"a replica group of {size} ranks was reported, and there are {len(told)}")
            known[name] = _ranks_of(told_group["first"], told_group["by"]) if is_grid else tuple(told_group)
        return known[name]

    return {rank: tuple(map(group_of, groups)) for rank, groups in enumerate(told)}


def _ranks_of(first: int, dimensions: Sequence[Sequence[int]]) -> Group:
    ranks = [first]
    for step, count in reversed(dimensions):
        ranks = [rank + place * step for rank in ranks for place in range(count)]
    return tuple(ranks)
