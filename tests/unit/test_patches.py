"""Check that replacements of attributes are made in order and undone in reverse, whole or not at all."""

from types import SimpleNamespace

import pytest

from checkpointless.integrations.megatron.cpu_platform import _replaced_by
from checkpointless.system.patches import Patch, Patches


class Base:
    def name(self) -> str:
        return "base"


class Derived(Base):
    def size(self) -> int:
        return 1


def patch(target: object, attribute: str, value: object) -> Patch:
    return Patch(target, attribute, _replaced_by(value), "for this test")


def test_what_is_undone_is_what_was_there_whether_inherited_missing_or_the_targets_own() -> None:
    before = dict(vars(Derived))
    made = Patches()
    made.make([patch(Derived, name, name) for name in ("name", "size", "no_such")])
    assert made.are_made
    assert (Derived.name, Derived.size, vars(Derived)["no_such"]) == ("name", "size", "no_such")
    made.undo()
    assert not made.are_made
    assert dict(vars(Derived)) == before
    made.undo()
    assert dict(vars(Derived)) == before


def test_a_replacement_of_a_replacement_is_undone_before_it() -> None:
    target = SimpleNamespace(value=1)
    made = Patches()
    made.make([Patch(target, "value", lambda old: old + 1, "twice")])
    made.make([Patch(target, "value", lambda old: old * 10, "twice")])
    assert target.value == 20
    made.undo()
    assert target.value == 1


def test_a_row_that_fails_undoes_the_earlier_ones_too() -> None:
    target = SimpleNamespace(first=1, second=2)
    made = Patches()
    made.make([patch(target, "first", 10)])
    with pytest.raises(AttributeError):
        made.make([patch(target, "second", 20), Patch(target, "second", lambda old: old.no_such_thing, "fails")])
    assert not made.are_made
    assert vars(target) == {"first": 1, "second": 2}
