"""Test local checkpoints of a job of one process: saves, asynchronous ones, other storage, and what is refused."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.replication import DirectoryStore, MemoryStore, local_checkpoint, register_store, store
from checkpointless.replication.exchange import cliques_of
from checkpointless.replication.local_checkpoint import BasicTensorAwareStateDict, LocalCheckpointManager
from checkpointless.replication.parts import PartId, SaveId
from checkpointless.replication.store import _FileName
from checkpointless.replication.tensor_aware import content_of, state_of
from checkpointless.state.serialization.state_tree import StateTreeError
from tests.ranks.local_checkpoint_ranks import Writer, bits, state


@pytest.fixture
def manager(tmp_path: Path) -> LocalCheckpointManager:
    return LocalCheckpointManager(tmp_path / "local" / "checkpoints")


def files(manager: LocalCheckpointManager, iteration: int | None = None) -> list[Path]:
    """Return the files of a manager: all, or those of one iteration."""
    pattern = "*" if iteration is None else f"iter_{iteration:010d}*"
    return sorted(Path(manager.local_ckpt_dir).glob(pattern))


PART = PartId(SaveId(5, "0123456789abcdef00000000"), 3)


def test_only_this_user_may_look(manager: LocalCheckpointManager) -> None:
    before = os.umask(0)
    try:
        manager.save({}, 1)
    finally:
        os.umask(before)
    (path,) = files(manager)
    assert [each.stat().st_mode & 0o777 for each in (path, path.parent)] == [0o600, 0o700]


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod 700"):
        LocalCheckpointManager(shared)


def test_a_save_of_an_earlier_iteration_supersedes_the_later_one(manager: LocalCheckpointManager) -> None:
    for run, iteration in ((1, 200), (2, 50), (3, 50)):
        manager.save({"run": run}, iteration)
        assert (manager.find_latest(), manager.load()[0]) == (iteration, {"run": run})


def test_what_a_dead_writer_left_and_what_is_not_ours(manager: LocalCheckpointManager) -> None:
    folder = Path(manager.local_ckpt_dir)
    (folder / _FileName(PART, 1, 0).unfinished).write_bytes(b"torn")
    (folder / "notes.txt").write_text("mine")
    assert manager.find_latest() == -1
    manager.save({}, 1)
    assert sorted(path.name.partition(".")[0] for path in files(manager)) == ["iter_0000000001", "notes"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_costs_the_save_and_leaves_the_one_before(
    manager: LocalCheckpointManager, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    manager.save(state(0, 5), 5)
    with patch.object(store.os, call, side_effect=OSError(errno.ENOSPC, "No space left on device")):
        manager.save(state(0, 6), 6)
    assert "part 0 of iteration 6 cannot be written by rank 0: [Errno 28] No space left on device" in caplog.text
    assert "iteration 6 is not kept: no undamaged copy is left of part 0 of iteration 6" in caplog.text
    assert len(files(manager)) == 1
    assert bits(manager.load()[0]) == bits(state(0, 5))
    assert manager.find_latest() == 5


def test_a_disk_without_room_is_not_written_to(manager: LocalCheckpointManager, caplog: Any) -> None:
    room = SimpleNamespace(f_bavail=1, f_frsize=4096)
    written = OSError("it was written to")
    with patch.object(store.os, "statvfs", return_value=room), patch.object(store.os, "open", side_effect=written):
        manager.save({"weights": torch.zeros(2048)}, 1)
    said = r"iteration 1 cannot be written by rank 0: .* 8\d+ bytes are needed and 4096 are free"
    assert re.search(said, caplog.text)


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


def test_a_store_of_another_kind_takes_the_place_of_the_disk() -> None:
    memory = MemoryStore()
    register_store("remembered", lambda name: memory)
    manager = LocalCheckpointManager("remembered://checkpoints")
    for iteration in range(3):
        manager.save(state(0, iteration), iteration)
    assert [save.iteration for save in memory.shelf(1)] == [1, 2]
    assert manager.find_latest() == 2
    assert bits(manager.load()[0]) == bits(state(0, 2))


# --- Asynchronous saves: requests, who carries them out, and how they end -----------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Keep files from being written until the event is set."""
    opened = threading.Event()
    write = DirectoryStore.write

    def gated(*arguments: Any) -> None:
        assert opened.wait(60)
        write(*arguments)

    monkeypatch.setattr(DirectoryStore, "write", gated)
    return opened


def begun(manager: LocalCheckpointManager, tree: Any, iteration: int) -> Writer:
    request = manager.save(tree, iteration, is_async=True)
    assert isinstance(request, local_checkpoint.AsyncRequest)
    return Writer(request)


def test_training_goes_on_while_a_copy_is_written(manager: LocalCheckpointManager, gate: threading.Event) -> None:
    tree = state(0, 5)
    work = begun(manager, tree, 5)
    tree["model"]["layers.0.weight"].add_(1)
    tree["model"]["strided"].zero_()
    assert work.is_alive()
    assert files(manager) == []
    gate.set()
    work.wait()
    assert bits(manager.load()[0]) == bits(state(0, 5))


def test_saves_that_are_being_written_are_left_alone(
    manager: LocalCheckpointManager, gate: threading.Event
) -> None:
    first, second = begun(manager, {"n": 1}, 1), begun(manager, {"n": 2}, 2)
    assert manager.find_latest() == -1
    gate.set()
    first.wait()
    second.wait()
    assert manager.find_latest() == 2
    manager.save({"n": 3}, 3)
    assert [len(files(manager, iteration)) for iteration in (1, 2, 3)] == [0, 1, 1]


@pytest.mark.slow
def test_another_process_carries_a_request_out(manager: LocalCheckpointManager) -> None:
    """As Megatron's persistent worker does it: what is to be done has to travel to a process that is not forked."""
    request = manager.save(state(0, 4), 4, is_async=True)
    assert request is not None
    writer = multiprocessing.get_context("spawn").Process(target=request.async_fn, args=request.async_fn_args)
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    request.execute_finalize_fns()
    assert bits(manager.load()[0]) == bits(state(0, 4))


# --- Replication strategies ---------------------------------------------------------------------------------------


def test_the_lazy_strategy_needs_no_process_group_to_be_made() -> None:
    assert not dist.is_initialized()
    strategy = local_checkpoint.LazyCliqueReplicationStrategy(replication_jump=2, replication_factor=3)
    assert (strategy.replication_jump, strategy.replication_factor) == (2, 3)
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        _ = strategy.replication_strategy


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_every_rank_is_in_one_clique_with_ranks_of_other_nodes(blocks: int, jump: int, factor: int) -> None:
    world = blocks * jump * factor
    cliques = cliques_of(world, jump, factor)
    assert sorted(rank for clique in cliques for rank in clique) == list(range(world))
    firsts = [a * jump * factor + b for a in range(blocks) for b in range(jump)]
    assert cliques == [tuple(first + step * jump for step in range(factor)) for first in firsts], "as documented"


# --- States that know their tensors are taken apart and come back as the class that they were ---------------------


def test_tensors_are_taken_out_and_put_back_in_order() -> None:
    aware = BasicTensorAwareStateDict(state(0, 5))
    taken = aware.pop_tensors()
    assert aware.is_hollow
    assert not any(isinstance(each, torch.Tensor) for each in aware.state_dict["model"].values())
    aware.insert_tensors(taken)
    assert not aware.is_hollow
    assert bits(aware.state_dict) == bits(state(0, 5))
    assert list(map(id, aware.tensors)) == list(map(id, taken))


class _Parameters(dict[str, Any]):
    """As Lightning keeps hyper-parameters."""


class _Pair(NamedTuple):
    first: torch.Tensor
    second: int


def test_subclasses_of_dict_and_tuple_come_back_plain() -> None:
    found = state_of(content_of({"hyper_parameters": _Parameters(lr=0.1), "pair": [_Pair(torch.zeros(2), 1)]}))
    assert repr(found) == repr({"hyper_parameters": {"lr": 0.1}, "pair": [(torch.zeros(2), 1)]})


@pytest.mark.parametrize("call", ["pop_tensors", "copy_tensors_to_cpu", "restore_tensor_device"])
def test_a_hollow_state_says_so(call: str) -> None:
    aware = BasicTensorAwareStateDict({"a": torch.zeros(3)})
    aware.pop_tensors()
    with pytest.raises(RuntimeError, match="the tensors of this state have been taken out"):
        getattr(aware, call)()
    with pytest.raises(ValueError, match="2 tensors cannot be put in 1 places"):
        aware.insert_tensors([torch.zeros(3)] * 2)
    aware.init_tensors()
    with pytest.raises(RuntimeError, match="have not been taken out"):
        aware.init_tensors()


def test_a_saved_state_comes_back_as_its_class_and_the_given_one_stays(tmp_path: Path) -> None:
    manager = LocalCheckpointManager(tmp_path)
    given = BasicTensorAwareStateDict(state(0, 5))
    manager.save(given, 5)
    assert bits(given.state_dict) == bits(state(0, 5))
    loaded, _ = manager.load()
    assert (type(loaded), bits(loaded.state_dict)) == (BasicTensorAwareStateDict, bits(state(0, 5)))


@dataclass
class Pair(local_checkpoint.TensorAwareStateDict):
    one: torch.Tensor
    other: torch.Tensor

    is_hollow = False

    @property
    def tensors(self) -> Any:
        return self.one, self.other

    def _unused(self, *arguments: Any, **settings: Any) -> Any:
        raise NotImplementedError

    pop_tensors = insert_tensors = init_tensors = copy_tensors_to_cpu = _unused

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        pass


def test_a_class_of_ones_own_has_to_be_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpointless.replication.tensor_aware._forms", {})
    given = Pair(torch.zeros(1), torch.ones(2))
    with pytest.raises(StateTreeError, match="Pair, which is not known: give it to register_form, on every rank"):
        content_of(given)
    local_checkpoint.register_form(Pair, lambda pair: [pair.one, pair.other], lambda tree: Pair(*tree))
    manager = LocalCheckpointManager(tmp_path)
    manager.save(given, 1)
    loaded, _ = manager.load()
    assert (type(loaded), loaded.other.tolist()) == (Pair, [1, 1])
    monkeypatch.setattr("checkpointless.replication.tensor_aware._forms", {})
    with pytest.raises(
        local_checkpoint.LocalCheckpointError, match="Pair is not known on this rank: call register_form"
    ):
        manager.load()
