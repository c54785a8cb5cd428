"""What the ranks conclude, after a fault, from what each of them says of its saves.

It is a pure function of what all ranks say, so every rank concludes the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Agreement:
    """Which saves are made again, which continue in the background, and which are lost.

    Background saves go by the numbers that Megatron's queues gave them, which are the same on every rank.

    Attributes:
        again: the paths that will be saved to again.
        whole: those of them that miss nothing, each with the number of its background save; None: it was made at
            once.
        in_vain: the background saves that are begun anew.
        failed: the background saves whose writer failed on some rank, and that are not begun anew.
        lost: the background saves that nobody will finish.
        forgotten: those of ``lost`` that no rank passes again.
        lost_paths: the known paths of ``lost``, the newest first.
        going_on: the paths of the background saves that continue.
        continues: whether the pending background saves of all ranks, if there are any, can continue.
        is_cut_off: whether there are some that cannot, because a rank has lost its writer.
        newest: the number that a queue assigned last; -1: none.
    """

    again: frozenset[str]
    whole: Mapping[str, int | None]
    in_vain: frozenset[int | None]
    failed: frozenset[int]
    lost: frozenset[int]
    forgotten: frozenset[int]
    lost_paths: tuple[str, ...]
    going_on: frozenset[str]
    continues: bool
    is_cut_off: bool
    newest: int

    @classmethod
    def of(cls, everyone: Sequence[Mapping[str, Any]], in_background: bool) -> Agreement:
        """Return what follows from what every rank says.

        Args:
            everyone: by rank, what it says: ``again``, for each save that it passes again its path, its number,
                whether its part is made and whether its end is gone through; ``pending``, the numbers of its
                pending background saves; ``newest``, the number that its queue assigned last (-1: none);
                ``failed``, the numbers of its saves whose writer failed; ``paths``, number and path of each
                unfinished save.
            in_background: whether the new trainers can continue background saves.
        """
        again = [{path: rest for path, *rest in each["again"]} for each in everyone]
        known = {path: rest for each in reversed(again) for path, rest in each.items()}  # the lowest rank's count
        whole = {
            path: number
            for path, (number, is_made, _) in known.items()
            # In a save that is made at once, the first rank's part is the last.
            if (is_made and path in again[0] if number is None else _is_one_save(path, number, again, everyone))
        }
        in_vain = {number for each in again for path, (number, *_) in each.items() if path not in whole}
        kept = [sorted(set(each["pending"]) - in_vain) for each in everyone]
        failed = {number for each in everyone for number in each["failed"]} - in_vain
        continues = in_background and all(each == kept[0] for each in kept)
        is_cut_off = not continues and any(kept)
        lost = set(failed)
        if is_cut_off:
            lost |= {number for each in kept for number in each}
            whole = {path: number for path, number in whole.items() if number is None}
        path_of = {number: path for each in everyone for number, path in each["paths"]}
        return cls(
            again=frozenset(known),
            whole=whole,
            in_vain=frozenset(in_vain),
            failed=frozenset(failed),
            lost=frozenset(lost),
            forgotten=frozenset(lost - {number for each in again for number, *_ in each.values()}),
            lost_paths=tuple(path_of[number] for number in sorted(lost, reverse=True) if number in path_of),
            going_on=frozenset(path_of[number] for number in kept[0] if number in path_of and number not in lost),
            continues=continues,
            is_cut_off=is_cut_off,
            newest=max(each["newest"] for each in everyone),
        )


def _is_one_save(
    path: str, number: int, again: Sequence[Mapping[str, Any]], everyone: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether a background save is pending on every rank, or finished on every rank that knows of it."""
    found = [each[path] for each in again if path in each]
    if not all(each[0] == number and each[1] for each in found):
        return False
    if any(number in each["pending"] for each in everyone):
        return len(found) == len(again) and all(number in each["pending"] for each in everyone)
    return all(each[2] for each in found)
