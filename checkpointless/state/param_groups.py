"""What is cheap to capture of optimizers at every step: their param groups; and which schedulers change those."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from checkpointless.state.serialization.later import copy_of, is_fixed

_MORE_PARAMETERS = (
    "an optimizer has other parameters than at the beginning (add_param_group), which no rank that is made anew "
    "has: give it all of them at the beginning, and train some of them later by their requires_grad"
)


class ParamGroups:
    """Takes the values of all param groups of some optimizers, learning rates included, and finds the parameters.

    Args:
        optimizers: the optimizers; None stands for one that has nothing to update on this rank.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer | None]) -> None:
        self._optimizers = list(optimizers)
        # By the lists in the groups: those lists, which keep their ids, and the parameters in them.
        self._listed: tuple[list[int], list[Any], list[torch.Tensor]] = ([], [], [])
        self._last: tuple[list[dict[str, Any]], Callable[[], list[list[dict[str, Any]]]]] = ([], list)
        # Of the values in these that can change in place: lists with their copies, and whether there are others.
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._has_others = False

    def take(self) -> Callable[[], list[list[dict[str, Any]]]]:
        """Take the values as they are now.

        Returns:
            What makes them, without the parameters: by optimizer and group, by name. It is the same object as long
            as no value has changed, and nobody changes what it makes. Learning rates that are tensors, which
            schedulers change in place, and other values that can be changed are copied.
        """
        groups = [group for each in self._optimizers if each is not None for group in each.param_groups]
        last, make = self._last
        is_alike = not self._has_others and len(groups) == len(last) and all(map(_is_alike, groups, last))
        if is_alike and all(now == then for now, then in self._lists):
            return make
        counts = [len(each.param_groups) if each is not None else 0 for each in self._optimizers]
        copies = [group.copy() for group in groups]
        changeable = self._copy_changeable(copies)

        def fresh() -> list[list[dict[str, Any]]]:
            made = [{name: value for name, value in group.items() if name != _PARAMS} for group in copies]
            for number, name, copy in changeable:
                made[number][name] = copy()
            rest = iter(made)
            return [[next(rest) for _ in range(count)] for count in counts]

        self._last = copies, fresh
        return fresh

    def _copy_changeable(self, groups: Sequence[dict[str, Any]]) -> list[tuple[int, str, Callable[[], Any]]]:
        """Copy what can change in place; return for each the group's number, the name, and what makes the copy."""
        self._lists, self._has_others = [], False
        copied: list[tuple[int, str, Callable[[], Any]]] = []
        for number, group in enumerate(groups):
            for name, value in group.items():
                if name == _PARAMS or is_fixed(value):
                    continue
                if type(value) is list and all(map(is_fixed, value)):
                    self._lists.append((value, list(value)))
                else:
                    self._has_others = True
                copied.append((number, name, copy_of(value)))
        return copied

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters in all groups, in order: the same list as long as the groups have the same."""
        lists = [group[_PARAMS] for each in self._optimizers if each is not None for group in each.param_groups]
        now = [*map(id, lists), *map(len, lists)]
        if now != self._listed[0]:
            self._listed = now, lists, [parameter for each in lists for parameter in each]
        return self._listed[2]


_PARAMS = "params"


def _is_alike(group: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two groups have the very same values under the same names, in the same order."""
    return len(group) == len(other) and all(map(operator.is_, group.values(), other.values()))


def plain_values(optimizers: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the values of each param group, learning rates among them, that cannot change in place; no tensors."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [{name: value for name, value in group.items() if is_fixed(value)} for group in groups]


def changed_value(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> str:
    """Return the name of a value of param groups, as :func:`plain_values` returns them, that differs; "": none."""
    for then, group in zip(before, now):
        for name in then.keys() & group.keys():
            if then[name] != group[name]:
                return name
    return ""


def without_scheduler(optimizers: Iterable[Any], schedulers: Iterable[Any]) -> str | None:
    """Return the class of an optimizer that has a scheduler of torch's, but none of ``schedulers``; None: all have.

    A scheduler marks its optimizer's ``step`` when it is made; ``ReduceLROnPlateau`` does not.
    """
    known = [_optimizer_of(scheduler) for scheduler in schedulers]
    if any(optimizer is None for optimizer in known):
        return None  # of a kind that does not say whose it is
    for optimizer in map(_unwrapped, optimizers):
        is_scheduled = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
        if is_scheduled and not any(optimizer is each for each in known):
            return type(optimizer).__name__
    return None


def plateaus(schedulers: Iterable[Any]) -> list[ReduceLROnPlateau]:
    """Return the schedulers that step by a metric: the loop calls their ``step``, and not the update."""
    return [inner for inner in map(_inner, schedulers) if isinstance(inner, ReduceLROnPlateau)]


def _inner(scheduler: Any) -> Any:
    return getattr(scheduler, "scheduler", scheduler)  # Accelerate's wrapper


def _optimizer_of(scheduler: Any) -> Any:
    optimizer = getattr(_inner(scheduler), "optimizer", None)
    return None if optimizer is None else _unwrapped(optimizer)


def _unwrapped(optimizer: Any) -> Any:
    """Return what Accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def sizes_of(optimizers: Iterable[torch.optim.Optimizer | None]) -> list[int]:
    """Return how many parameters each param group of each optimizer has; of None, there are none."""
    return [len(group["params"]) for each in optimizers if each is not None for group in each.param_groups]


def grown(optimizers: Iterable[torch.optim.Optimizer | None], sizes: list[int]) -> str:
    """Return why no rank that is rebuilt has what the optimizers have; "" if it has.

    Args:
        optimizers: the optimizers.
        sizes: what :func:`sizes_of` returned at the beginning.
    """
    return _MORE_PARAMETERS if sizes_of(optimizers) != sizes else ""
