"""How a loop of one's own with Megatron's optimizer is begun; tests/ranks/test_megatron_loop.py has such loops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from checkpointless.inprocess import HPWrapper

pytestmark = pytest.mark.nemo


def test_the_wrapper_prepares_at_every_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpointless.integrations.megatron.training import MegatronTraining

    done: list[str] = []
    monkeypatch.setattr(MegatronTraining, "prepare", staticmethod(lambda: done.append("prepared")))

    @MegatronTraining.wrapper(HPWrapper(enabled=False))
    def main(what: str) -> str:
        """Train."""
        done.append(what)
        return what

    assert [main("first"), main("second")] == ["first", "second"]
    assert done == ["prepared", "first", "prepared", "second"]
    assert (main.__name__, main.__doc__) == ("main", "Train.")


def test_what_is_missing_is_said() -> None:
    from checkpointless.integrations.megatron.training import MegatronTraining

    with pytest.raises(ValueError, match="no block is running"):
        MegatronTraining()
    call: Any = SimpleNamespace()
    with pytest.raises(ValueError, match="give the chunks and the optimizer"):
        MegatronTraining(call)
