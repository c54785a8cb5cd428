"""Test local checkpoints of a job of one process: saves, another storage, what is lost and what is refused."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from checkpointless.recovery import LocalCheckpointManager
from checkpointless.replication import MemoryStore, register_store, store
from checkpointless.replication.parts import PartId, SaveId
from checkpointless.replication.store import _FileName
from tests.ranks.local_checkpoint_ranks import bits, state
from tests.unit.local_checkpoint.conftest import files

PART = PartId(SaveId(5, "0123456789abcdef00000000"), 3)


def test_save_find_and_load(manager: LocalCheckpointManager, tmp_path: Path) -> None:
    assert manager.find_latest() == -1
    assert manager.save(state(0, 5), 5) is None
    for each in (manager, LocalCheckpointManager(tmp_path / "local" / "checkpoints")):
        assert each.find_latest() == 5
        loaded, part = each.load()
        assert bits(loaded) == bits(state(0, 5))
        assert PartId.parse(part).words == "part 0 of iteration 5"


def test_only_this_user_may_look(manager: LocalCheckpointManager, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        manager.save({}, 1)
    finally:
        os.umask(before)
    (path,) = files(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod 700"):
        LocalCheckpointManager(shared)


def test_a_save_of_an_earlier_iteration_supersedes_the_later_one(manager: LocalCheckpointManager) -> None:
    manager.save({"run": 1}, 200)
    manager.save({"run": 2}, 50)
    assert manager.find_latest() == 50
    manager.save({"run": 3}, 50)
    assert manager.find_latest() == 50
    assert manager.load()[0] == {"run": 3}


def test_what_a_dead_writer_left_and_what_is_not_ours(manager: LocalCheckpointManager, tmp_path: Path) -> None:
    folder = tmp_path / "local" / "checkpoints"
    (folder / _FileName(PART, 1, 0).unfinished).write_bytes(b"torn")
    (folder / "notes.txt").write_text("mine")
    assert manager.find_latest() == -1
    manager.save({}, 1)
    assert sorted(path.name.partition(".")[0] for path in files(tmp_path)) == ["iter_0000000001", "notes"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_costs_the_save_and_leaves_the_one_before(
    manager: LocalCheckpointManager,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    manager.save(state(0, 5), 5)
    with monkeypatch.context() as full:
        full.setattr(store.os, call, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        manager.save(state(0, 6), 6)
    assert "part 0 of iteration 6 cannot be written by rank 0: [Errno 28] No space left on device" in caplog.text
    assert "iteration 6 is not kept: no undamaged copy is left of part 0 of iteration 6" in caplog.text
    assert len(files(tmp_path)) == 1
    assert bits(manager.load()[0]) == bits(state(0, 5))
    assert manager.find_latest() == 5


def test_a_disk_without_room_is_not_written_to(
    manager: LocalCheckpointManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(store.os, "statvfs", lambda path: room)
    monkeypatch.setattr(store.os, "open", Mock(side_effect=OSError("it was written to")))
    manager.save({"weights": torch.zeros(2048)}, 1)
    assert re.search(
        r"iteration 1 cannot be written by rank 0: .* 8\d+ bytes are needed and 4096 are free", caplog.text
    )


# --- where --------------------------------------------------------------------------------------------------------


def test_jobs_that_share_a_directory_have_names(tmp_path: Path) -> None:
    one, other = (LocalCheckpointManager(tmp_path, session_id) for session_id in ("one", "other"))
    one.save({"job": 1}, 5)
    assert other.find_latest() == -1
    assert one.local_ckpt_dir == tmp_path / "one"
    assert LocalCheckpointManager(tmp_path, "one").load()[0] == {"job": 1}


@pytest.mark.parametrize("session_id", ["..", ".", "a/b", "a\0b"])
def test_a_session_is_a_name_of_a_folder(tmp_path: Path, session_id: str) -> None:
    with pytest.raises(ValueError, match="a name for a folder"):
        LocalCheckpointManager(tmp_path, session_id)


# --- another store ------------------------------------------------------------------------------------------------


def test_a_store_of_another_kind_takes_the_place_of_the_disk() -> None:
    memory = MemoryStore()
    register_store("remembered", lambda name: memory)
    manager = LocalCheckpointManager("remembered://checkpoints")
    for iteration in range(3):
        manager.save(state(0, iteration), iteration)
    assert [save.iteration for save in memory.shelf(1)] == [1, 2]
    assert manager.find_latest() == 2
    assert bits(manager.load()[0]) == bits(state(0, 2))
