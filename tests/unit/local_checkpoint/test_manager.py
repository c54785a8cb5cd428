"""Local checkpoints of a job of one process: the file format, generations, asynchronous saves, what is refused."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import checkpointless
from checkpointless.local_checkpoint import manager as local
from checkpointless.local_checkpoint import part_file, part_store
from checkpointless.local_checkpoint.part_file import (
    Content,
    Generation,
    PartFileError,
    PartId,
    PartName,
    part_world_size,
    read_part,
    verify_part,
    write_part,
)
from checkpointless.recovery import LocalCheckpointError, LocalCheckpointManager
from checkpointless.serialization.state_tree import StateTreeError
from tests.ranks.local_checkpoint_ranks import bits, state

PART = PartId(Generation(5, "0123456789abcdef00000000"), 3)
NAME = PartName(PART, 2, finished=True)
dtypes = st.sampled_from(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int8, torch.bool]
)


def noise(dtype: torch.dtype, shape: list[int], transposed: bool) -> torch.Tensor:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(torch.float32).sin().to(dtype)
    return tensor.t() if transposed and tensor.dim() == 2 else tensor


tensors = st.builds(noise, dtypes, st.lists(st.integers(0, 5), max_size=3), st.booleans())
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text()) | st.just("a.b")
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
trees = st.recursive(
    tensors | plain,
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.lists(inner).map(tuple),
    max_leaves=12,
)
in_a_folder = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


# --- one file ----------------------------------------------------------------------------------------------------


@in_a_folder
@given(tree=trees)
def test_every_tree_comes_back_with_all_its_bits(tmp_path: Path, tree: Any) -> None:
    path = write_part(tmp_path, NAME, 8, Content.of(tree))
    verify_part(path)
    assert part_world_size(path) == 8
    assert bits(read_part(path).state()) == bits(tree)


@pytest.mark.parametrize(
    "tree", [("tensor",), (0, "tensor"), ("a", "tuple"), {"t": "tensor", "v": 0}, [(torch.ones(2), "tensor")]]
)
def test_what_looks_like_a_reference_to_a_tensor_is_none(tree: Any) -> None:
    assert bits(Content.of(tree).state()) == bits(tree)


def test_views_and_parameters_come_back_as_plain_tensors() -> None:
    numbers = torch.complex(torch.arange(3.0), torch.arange(3.0) + 1)
    tree = {
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "expanded": torch.ones(1).expand(4),
    }
    back = Content.of(tree).state()
    assert type(back["parameter"]) is torch.Tensor
    assert not back["parameter"].requires_grad
    assert back["conjugate"].tolist() == [0 - 1j, 1 - 2j, 2 - 3j]
    assert bits(back["negative"]) == bits(torch.tensor([-1.0, -2.0, -3.0]))
    assert bits(back["expanded"]) == bits(torch.ones(4))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A part file as it should be."""
    tree = {"weight": torch.arange(30.0), "step": torch.tensor(3), "lr": 0.1}
    return write_part(tmp_path_factory.mktemp("good"), NAME, 4, Content.of(tree)).read_bytes()


@in_a_folder
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path, good: bytes, place: float, bit: int) -> None:
    damaged = bytearray(good)
    damaged[int(place * len(good))] ^= 1 << bit
    path = tmp_path / NAME.file
    path.write_bytes(damaged)
    with pytest.raises(PartFileError, match=re.escape(NAME.file)):
        verify_part(path)
    with pytest.raises(PartFileError):
        read_part(path)


@in_a_folder
@given(place=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_off_is_found_by_its_seal(tmp_path: Path, good: bytes, place: float) -> None:
    path = tmp_path / NAME.file
    path.write_bytes(good[: int(place * len(good))])
    with pytest.raises(PartFileError):
        part_world_size(path)


@pytest.mark.parametrize("change", [lambda data: data + b"\0", lambda data: b"\0" + data, lambda data: data * 2])
def test_more_than_the_file_is_not_the_file(tmp_path: Path, good: bytes, change: Callable[[bytes], bytes]) -> None:
    path = tmp_path / NAME.file
    path.write_bytes(change(good))
    with pytest.raises(PartFileError):
        verify_part(path)


def test_a_file_under_the_name_of_another_part_is_refused(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / PartName(PartId(PART.generation, 1), 2, finished=True).file
    path.write_bytes(good)
    with pytest.raises(PartFileError, match=r"part 3 of iteration 5 .* and not what its name says"):
        part_world_size(path)


def test_the_header_is_where_it_is_said_to_be(good: bytes) -> None:
    assert good.startswith(b"CKPTPRT1")
    length = int.from_bytes(good[8:16], "little")
    tensors = good[16 + length : 16 + length + 30 * 4 + 8]
    assert torch.frombuffer(bytearray(tensors[:120]), dtype=torch.float32).tolist() == list(range(30))
    assert int.from_bytes(tensors[120:], "little") == 3
    assert int.from_bytes(good[-16:-8], "little") == 2


@given(iteration=st.integers(0, 10**12), part=st.integers(0, 10**6), holder=st.integers(0, 10**6), finished=...)
def test_names_of_files(iteration: int, part: int, holder: int, finished: bool) -> None:
    name = PartName(PartId(Generation(iteration, "f" * 24), part), holder, finished)
    assert PartName.parse(name.file) == name
    assert PartId.parse(str(name.id)) == name.id
    assert Generation.parse(str(name.id.generation)) == name.id.generation


@pytest.mark.parametrize(
    "file", ["notes.txt", f".{NAME.file}", f"{NAME.file}.tmp", "iter_5.part_3.held_2.ckpt", ""]
)
def test_files_of_others(file: str) -> None:
    assert PartName.parse(file) is None


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'part_3' names no part"):
        PartId.parse("part_3")
    with pytest.raises(ValueError, match="'5' is no generation"):
        Generation.parse("5")


class Sharded(torch.Tensor):
    """A tensor that is more than its memory, as a DTensor is."""


@pytest.mark.parametrize(
    "intruder",
    [
        object(),
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        torch.ones(1).as_subclass(Sharded),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(intruder: Any) -> None:
    with pytest.raises(StateTreeError, match=r"state\['callbacks'\]\[1\]\['EMA'\]"):
        Content.of({"callbacks": (0, {"EMA": intruder})})


# --- the manager --------------------------------------------------------------------------------------------------


@pytest.fixture
def manager(tmp_path: Path) -> LocalCheckpointManager:
    return LocalCheckpointManager(tmp_path / "local" / "checkpoints")


def files(folder: Path, iteration: int | None = None) -> list[Path]:
    pattern = "*" if iteration is None else f"iter_{iteration:010d}*"
    return sorted((folder / "local" / "checkpoints").glob(pattern))


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


def test_no_local_checkpoint_to_load(manager: LocalCheckpointManager, tmp_path: Path) -> None:
    with pytest.raises(LocalCheckpointError, match=f"no rank has a local checkpoint.*{tmp_path}"):
        manager.load()


@pytest.mark.parametrize("iteration", [-1, 1.0, "1", True])
def test_iterations_are_numbers_from_0_on(manager: LocalCheckpointManager, iteration: Any, tmp_path: Path) -> None:
    with pytest.raises(LocalCheckpointError, match="an iteration is a number from 0 on"):
        manager.save({}, iteration)
    assert files(tmp_path) == []


def test_the_older_save_is_there_until_the_next_but_one(
    manager: LocalCheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there_while_written = []
    write = part_store.write_part

    def observed(*arguments: Any) -> Path:
        there_while_written.append([int(path.name[5:15]) for path in files(tmp_path)])
        return write(*arguments)

    monkeypatch.setattr(part_store, "write_part", observed)
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
    (folder / PartName(PART, 0, finished=False).file).write_bytes(b"torn")
    (folder / "notes.txt").write_text("mine")
    assert manager.find_latest() == -1
    manager.save({}, 1)
    assert sorted(path.name.partition(".")[0] for path in files(tmp_path)) == ["iter_0000000001", "notes"]


def test_parts_of_a_job_of_another_size_are_not_loaded(manager: LocalCheckpointManager, tmp_path: Path) -> None:
    name = PartName(PartId(PART.generation, 0), 0, finished=True)
    write_part(tmp_path / "local" / "checkpoints", name, 2, Content.of({}))
    assert manager.find_latest() == -1
    write_part(tmp_path / "local" / "checkpoints", name, 1, Content.of({}))
    assert manager.find_latest() == 5


def test_a_directory_that_is_lost_while_training_is_made_again(
    manager: LocalCheckpointManager, tmp_path: Path
) -> None:
    (tmp_path / "local" / "checkpoints").rmdir()
    manager.save({}, 1)
    assert manager.find_latest() == 1


def fail(error: OSError) -> Callable[..., None]:
    def failing(*arguments: Any, **settings: Any) -> None:
        raise error

    return failing


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_save_before_as_it_was(
    manager: LocalCheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    manager.save(state(0, 5), 5)
    with monkeypatch.context() as full:
        full.setattr(part_file.os, call, fail(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(LocalCheckpointError, match=r"writing iteration 6: rank 0: .*No space left on device"):
            manager.save(state(0, 6), 6)
    assert len(files(tmp_path)) == 1
    assert bits(manager.load()[0]) == bits(state(0, 5))
    assert manager.find_latest() == 5


def test_an_interrupted_save_leaves_nothing(
    manager: LocalCheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.save(state(0, 5), 5)

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(part_file.os, "fsync", interrupted)
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
    assert "an old local checkpoint cannot be deleted" in caplog.text


# --- asynchronous saves -------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are written only when it is set."""
    opened = threading.Event()
    write = part_store.write_part

    def gated(*arguments: Any) -> Path:
        assert opened.wait(20)
        return write(*arguments)

    monkeypatch.setattr(part_store, "write_part", gated)
    return opened


def test_training_goes_on_while_a_copy_is_written(
    manager: LocalCheckpointManager, gate: threading.Event, tmp_path: Path
) -> None:
    tree = state(0, 5)
    work = manager.save(tree, 5, is_async=True)
    assert isinstance(work, local.AsyncSave)
    tree["model"]["layers.0.weight"].add_(1)
    tree["model"]["strided"].zero_()
    assert not work.done()
    with pytest.raises(TimeoutError, match="iteration 5 on rank 0 is still being written"):
        work.wait(timedelta(seconds=0.01))
    assert files(tmp_path) == []
    gate.set()
    work.wait()
    assert work.done()
    assert bits(manager.load()[0]) == bits(state(0, 5))


def test_a_call_waits_for_the_save_before(manager: LocalCheckpointManager, gate: threading.Event) -> None:
    manager.save({"n": 1}, 1, is_async=True)
    threading.Timer(0.1, gate.set).start()
    assert manager.find_latest() == 1
    manager.save({"n": 2}, 2, is_async=True)
    manager.save({"n": 3}, 3)
    assert manager.find_latest() == 3


@pytest.mark.parametrize("waited", [True, False])
def test_the_error_of_an_asynchronous_save_is_raised(
    manager: LocalCheckpointManager, monkeypatch: pytest.MonkeyPatch, waited: bool, tmp_path: Path
) -> None:
    manager.save({}, 1)
    with monkeypatch.context() as full:
        full.setattr(part_file.os, "fsync", fail(OSError(errno.ENOSPC, "No space left on device")))
        work = manager.save({}, 2, is_async=True)
        assert work is not None
        while not work.done():
            pass
    if waited:
        with pytest.raises(LocalCheckpointError, match=r"iteration 2 on rank 0 .*No space left"):
            work.wait()
    with pytest.raises(LocalCheckpointError, match=r"rank 0: iteration 2 .*No space left"):
        manager.save({}, 3)
    assert [int(path.name[5:15]) for path in files(tmp_path)] == [1]
    manager.save({}, 3)
    assert manager.find_latest() == 3
