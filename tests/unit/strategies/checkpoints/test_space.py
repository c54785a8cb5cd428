"""Test what is known of a save before it begins."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.nemo


def outlook(**fields: Any) -> Any:
    from checkpointless.strategies.checkpoints.space import Outlook

    return replace(Outlook("", 600, 1000, True), **fields)


@pytest.mark.parametrize(
    ("first", "second", "objecting"),
    [
        ({}, {"nbytes": 400}, set()),
        ({}, {"nbytes": 401}, {0}),
        ({}, {"free": 1199}, {0}),  # two ranks write 1200 to what the first says has 1000
        ({"free": 5000}, {"free": 1199}, {1}),
        ({}, {"free": None}, set()),  # not known
        ({}, {"shares": False}, set()),  # another file system
        ({"problem": "read-only"}, {"nbytes": 400}, {0}),
        ({"problem": "read-only"}, {"problem": "read-only"}, {0, 1}),
    ],
)
def test_only_what_clearly_cannot_be_is_objected_to(first: Any, second: Any, objecting: set[int]) -> None:
    from checkpointless.strategies.checkpoints.space import objections

    assert set(objections([outlook(**first), outlook(**second)])) == objecting


def test_a_lack_of_space_is_told_with_both_sizes() -> None:
    from checkpointless.strategies.checkpoints.space import objections

    assert objections([outlook(nbytes=2000)]) == {0: "it has at least 2 kB, and 1 kB are free"}


def test_only_what_no_other_rank_writes_is_counted() -> None:
    from checkpointless.strategies.checkpoints.space import bytes_to_write

    mine = SimpleNamespace(data=torch.zeros(3), replica_id=(0, 0, 0))
    theirs = SimpleNamespace(data=torch.zeros(5), replica_id=(0, 1, 0))
    thing = SimpleNamespace(data="object", replica_id=0)
    assert bytes_to_write({"a": mine, "b": [theirs, {"c": mine}], "d": thing, "e": 7}) == 2 * 3 * 4


def test_free_space_is_not_known_where_files_are_written_over(tmp_path: Path) -> None:
    from checkpointless.strategies.checkpoints.space import free_bytes

    assert free_bytes(tmp_path) is None or free_bytes(tmp_path)
    (tmp_path / "part").touch()
    assert free_bytes(tmp_path) is None


def test_a_mount_that_is_gone_is_a_problem_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from checkpointless.strategies.checkpoints.space import Mounts

    mounted, ismount = {str(tmp_path / "a")}, os.path.ismount
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) in mounted or ismount(path))
    mounts = Mounts()
    folder = tmp_path / "a" / "b" / "checkpoints"
    mounts.see(folder)
    assert mounts.problem(folder) == ""
    mounted.clear()
    assert mounts.problem(folder) == f"{tmp_path / 'a'} is not mounted any more"
    mounted.add(str(tmp_path / "a"))
    assert mounts.problem(folder) == ""
