"""Test local checkpoints of a job of one process: saves, another storage, what is lost and what is refused."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import checkpointless
from checkpointless.recovery import LocalCheckpointError, LocalCheckpointManager
from checkpointless.replication import DirectoryStore, MemoryStore, register_store, store
from checkpointless.replication.parts import Content, Part, PartId, SaveId
from checkpointless.replication.store import _FileName
from tests.ranks.local_checkpoint_ranks import bits, state
from tests.unit.local_checkpoint.disk import fail, files

PART = PartId(SaveId(5, "0123456789abcdef00000000"), 3)


def test_the_names_are_public() -> None:
    for name in ("LocalCheckpointManager", "CliqueReplicationStrategy", "LazyCliqueReplicationStrategy"):
        assert getattr(checkpointless, name) is getattr(checkpointless.recovery, name)


def test_save_find_and_load(manager: LocalCheckpointManager, tmp_path: Path) -> None:
    assert manager.find_latest() == -1
    assert manager.save(state(0, 5), 5) is None
    for each in (manager, LocalCheckpointManager(tmp_path / "local" / "checkpoints")):
        assert each.find_latest() == 5
        loaded, part = each.load()
        assert bits(loaded) == bits(state(0, 5))
        assert PartId.parse(part).words == "part 0 of iteration 5"


def test_an_object_with_a_state_dict(manager: LocalCheckpointManager) -> None:
    manager.save(SimpleNamespace(state_dict={"lr": 0.1}), 0)
    assert manager.load()[0] == {"lr": 0.1}
    module = torch.nn.Linear(2, 2)
    manager.save(module, 1)
    assert bits(manager.load()[0]) == bits(dict(module.state_dict()))


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


@pytest.mark.parametrize("iteration", [-1, 1.0, "1", True])
def test_iterations_are_numbers_from_0_on(manager: LocalCheckpointManager, iteration: Any, tmp_path: Path) -> None:
    with pytest.raises(LocalCheckpointError, match="an iteration must be a whole number of at least 0"):
        manager.save({}, iteration)
    assert files(tmp_path) == []


def test_the_older_save_is_there_until_the_next_but_one(
    manager: LocalCheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there_while_written = []
    write = DirectoryStore.write

    def observed(*arguments: Any) -> None:
        there_while_written.append([int(path.name[5:15]) for path in files(tmp_path)])
        write(*arguments)

    monkeypatch.setattr(DirectoryStore, "write", observed)
    for iteration in range(4):
        manager.save({}, iteration)
    assert there_while_written == [[], [0], [1], [2]]
    assert [len(files(tmp_path, iteration)) for iteration in range(4)] == [0, 0, 1, 1]


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


def test_parts_of_a_job_of_another_size_are_not_loaded(manager: LocalCheckpointManager, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "local" / "checkpoints")
    for world_size, found in ((2, -1), (1, 5)):
        store.write(Part.sealed(PartId(PART.save, 0), world_size, Content.of({})), 0)
        assert manager.find_latest() == found


def test_a_directory_that_is_lost_while_training_is_made_again(
    manager: LocalCheckpointManager, tmp_path: Path
) -> None:
    (tmp_path / "local" / "checkpoints").rmdir()
    manager.save({}, 1)
    assert manager.find_latest() == 1


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
        full.setattr(store.os, call, fail(OSError(errno.ENOSPC, "No space left on device")))
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
    monkeypatch.setattr(store.os, "open", fail(OSError("it was written to")))
    manager.save({"weights": torch.zeros(2048)}, 1)
    assert re.search(
        r"iteration 1 cannot be written by rank 0: .* 8\d+ bytes are needed and 4096 are free", caplog.text
    )


def test_an_interrupted_save_leaves_nothing(
    manager: LocalCheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.save(state(0, 5), 5)

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store.os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.save(state(0, 6), 6)
    assert len(files(tmp_path)) == 1
    assert manager.find_latest() == 5


def test_what_cannot_be_deleted_does_not_fail_the_save(
    manager: LocalCheckpointManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager.save({}, 1)
    manager.save({}, 2)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", fail(PermissionError(errno.EPERM, "Operation not permitted")))
        manager.save({}, 3)
    assert manager.find_latest() == 3
    assert "an old copy cannot be deleted" in caplog.text


def test_nothing_is_deleted_before_a_newer_save_is_complete(
    manager: LocalCheckpointManager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    larger_jobs = Part.sealed(PartId(PART.save, 0), 2, Content.of({}))
    DirectoryStore(tmp_path / "local" / "checkpoints").write(larger_jobs, 0)
    with monkeypatch.context() as full:
        full.setattr(store.os, "fsync", fail(OSError(errno.ENOSPC, "No space left on device")))
        manager.save({}, 6)
    assert [int(path.name[5:15]) for path in files(tmp_path)] == [5]
    manager.save({}, 7)
    assert [int(path.name[5:15]) for path in files(tmp_path)] == [7]


def test_a_directory_that_cannot_be_used_costs_the_copies(
    manager: LocalCheckpointManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "local" / "checkpoints"
    folder.rmdir()
    folder.touch()
    manager.save({}, 1)
    assert manager.find_latest() == -1
    assert "part 0 of iteration 1 cannot be written by rank 0" in caplog.text
    assert "rank 0 cannot look at its local checkpoints" in caplog.text


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
