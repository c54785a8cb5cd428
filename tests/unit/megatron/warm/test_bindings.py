"""Test that references to old process groups are found wherever a model keeps them."""

from __future__ import annotations

import functools
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointless.integrations.megatron.warm import _Walk

pytestmark = pytest.mark.nemo  # the folder of the code imports Megatron-core

Pair = namedtuple("Pair", ["group", "other"])


class Group:
    """Stands for a process group: an object that is told by its identity."""


class Slotted:
    __slots__ = ("group",)

    def __init__(self, group: Group) -> None:
        self.group = group


@dataclass
class Config:
    group: Any
    others: dict[str, Any]


def test_every_place_is_found() -> None:
    old, new, kept = Group(), Group(), Group()

    def closure() -> Group:
        return old_in_cell

    old_in_cell = old

    def default(group: Group = old, *, named: Group = old) -> tuple[Group, Group]:
        return group, named

    default.__dict__["attribute"] = old
    owner = SimpleNamespace(group=old, kept=kept)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.group = old  # type: ignore[attr-defined]
    partial = functools.partial(print, old, file=old)
    roots: dict[str, Any] = {
        "list": [old, (kept, old)],
        "dict": {"a": {"b": old}},
        "pair": Pair(old, kept),
        "config": Config(old, {"x": [old]}),
        "slots": Slotted(old),
        "closure": closure,
        "default": default,
        "method": owner.__repr__,
        "partial": partial,
        "parameter": parameter,
        "owner": owner,
    }
    assert _Walk([roots], {id(old): new}).replaced == 15
    assert roots["list"] == [new, (kept, new)]
    assert roots["dict"] == {"a": {"b": new}}
    assert roots["pair"] == Pair(new, kept)
    assert roots["config"] == Config(new, {"x": [new]})
    assert roots["slots"].group is new
    assert closure() is new
    assert default() == (new, new)
    assert default.__dict__["attribute"] is new
    assert (owner.group, owner.kept) == (new, kept)
    assert (partial.args, partial.keywords) == ((new,), {"file": new})
    assert parameter.group is new  # type: ignore[attr-defined]


class Tracker:
    """Stands for a tracker of random streams."""

    def fork(self) -> Tracker:
        return self


def test_methods_are_bound_to_the_successor() -> None:
    old, new = Tracker(), Tracker()
    owner = SimpleNamespace(context=old.fork, partial=functools.partial(old.fork), tracker=old)
    assert _Walk([owner], {id(old): new}).replaced == 3
    assert owner.context() is owner.partial() is owner.tracker is new
