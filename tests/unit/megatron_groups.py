"""Make Megatron's process groups at the real world size of a layout, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from checkpointless.system.layout import Layout


@contextmanager
def megatron(layout: Layout, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> Iterator[dict[str, list[Any]]]:
    """Make the groups at the real world size; yield, by name, the ranks of all groups, also of other ranks'."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("hydra", reason="recipes need hydra-core")
    from megatron.core import parallel_state

    from checkpointless.recipes.counting import as_rank

    made: dict[str, list[Any]] = {}
    create = parallel_state.create_group

    def note(ranks: Any = None, *args: Any, group_desc: str = "", **kwargs: Any) -> Any:
        made.setdefault(group_desc, []).append(tuple(ranks))
        return create(ranks, *args, group_desc=group_desc, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(parallel_state, "create_group", note)
        with as_rank(layout, rank):
            yield made
