"""Copies of one generation: what its threads still do after a fault spoils nothing of the next generation's."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.disk_storage import DiskStorage
from checkpointless.local_checkpoint.memory_storage import MemoryStorage
from checkpointless.local_checkpoint.part_id import PartId, SaveId
from checkpointless.local_checkpoint.part_storage import PartStorage, Shelf, read_any
from checkpointless.recovery.moment import Moment, Stage
from checkpointless.recovery.tiers.copying import Copying
from checkpointless.recovery.tiers.directories import LocalDirectory, SharedDirectory
from checkpointless.recovery.tiers.host_part import HostMemoryPool, HostPart, room_for
from checkpointless.recovery.tiers.lineage import Lineage
from checkpointless.recovery.tiers.neighbor_memory import NeighborMemory
from checkpointless.recovery.tiers.snapshot import Snapshot
from checkpointless.recovery.tiers.tier import Tier

LIMIT_S = 30.0
FIRST = Lineage("0" * 16).begin(0, 0)


class SlowStorage(DiskStorage):
    """A directory that answers when it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked, self.go_on = threading.Event(), threading.Event()

    def write(self, parts: Sequence[tuple[PartId, Content]], holder: int, world_size: int) -> None:
        """Write when it is told to."""
        self.asked.set()
        assert self.go_on.wait(LIMIT_S)
        super().write(parts, holder, world_size)


class GoneStorage(DiskStorage):
    """A directory that does not answer before the test is over."""

    over = threading.Event()

    def shelf(self, holder: int, world_size: int) -> Shelf:
        """Do not answer."""
        self.over.wait(LIMIT_S)
        raise OSError("gone")


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state(step: int) -> Snapshot:
    weight = torch.full((1000,), float(step))
    return Snapshot(step, Stage.COMMITTED, 1, 0, {("model", 0, "weight"): weight}, Moment({"step": step}, {}), b"")


def named(lineage: Lineage, step: int) -> SaveId:
    save = lineage.save(step)
    assert save is not None
    return save


def weight_of(storage: PartStorage, save: SaveId) -> float:
    """Return the one value that all elements of a stored state have."""
    content = read_any(storage.shelf(0, 1)[save][0])
    assert content is not None
    (values,) = Snapshot.of(content).tensors.values()
    assert torch.equal(values, values[:1].expand(1000))
    return float(values[0])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def copying(tiers: Sequence[Tier], storages: Mapping[str, PartStorage], lineage: Lineage) -> Copying:
    return Copying(tiers, storages, {}, {}, lineage)


def test_a_write_that_a_fault_leaves_behind_is_of_the_bytes_that_it_began_with(tmp_path: Path) -> None:
    """Two later generations copy other steps while the first one's writer is stuck."""
    tiers = [LocalDirectory(tmp_path, every=1, copies=0)]
    (tmp_path / "copies").mkdir(mode=0o700)
    slow = SlowStorage(tmp_path / "copies")
    first = copying(tiers, {tiers[0].name: slow}, FIRST)
    assert first.begin(named(FIRST, 1), state(1), tiers).arrived.wait(LIMIT_S)
    assert slow.asked.wait(LIMIT_S)
    first.leave()
    lineage = FIRST
    for generation in (1, 2):
        lineage = lineage.begin(generation, 1)
        later = copying(tiers, {tiers[0].name: DiskStorage(tmp_path / "copies")}, lineage)
        save = named(lineage, 2)
        assert later.begin(save, state(10 * generation), tiers).arrived.wait(LIMIT_S)
        wait_until(lambda directory=later.directories[tiers[0].name]: directory.outcome != "busy")  # type: ignore[misc]
        assert weight_of(DiskStorage(tmp_path / "copies"), save) == 10 * generation
        later.leave()
    slow.go_on.set()
    wait_until(lambda: first.has_ended)
    assert weight_of(DiskStorage(tmp_path / "copies"), named(FIRST, 1)) == 1


def test_memory_of_a_generation_that_was_left_is_not_changed_any_more() -> None:
    tier = NeighborMemory()
    tier.copies = 0  # the job has one rank
    storage = MemoryStorage()
    first = copying([tier], {tier.name: storage}, FIRST)
    assert first.begin(named(FIRST, 1), state(1), [tier]).arrived.wait(LIMIT_S)
    first.leave()
    making = first.begin(named(FIRST, 2), state(2), [tier])
    wait_until(lambda: first.has_ended)
    assert not making.begun
    assert [*storage.shelf(0, 1)] == [named(FIRST, 1)]


class Neighbor:
    """Stands for an exchange with one neighbor, which gives its part when it is told to, or fails."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.error: Exception | None = None

    def exchange(self, part: HostPart | None, pool: HostMemoryPool) -> Iterator[tuple[int, HostPart]]:
        """Give a part of rank 1."""
        assert self.go_on.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        assert part is not None
        yield 1, room_for(part.header(), part.memory.numel(), pool)


def with_neighbor(
    neighbor: Neighbor, storage: MemoryStorage, lineage: Lineage, *more: Tier, last: Copying | None = None
) -> tuple[Copying, list[Tier]]:
    """Return what copies to one neighbor's memory, too."""
    tiers = [NeighborMemory(), *more]
    storages: dict[str, PartStorage] = {tiers[0].name: storage}
    storages.update({tier.name: DiskStorage(tier.path) for tier in more})  # type: ignore[attr-defined]
    exchanges: Any = {(1, 1): neighbor}
    return Copying(tiers, storages, {tiers[0].name: (1, 1)}, exchanges, lineage, last), tiers


def parts_of(storage: MemoryStorage) -> dict[int, set[int]]:
    """Return by step the ranks whose parts are in memory."""
    return {save.iteration: {*parts} for save, parts in storage.shelf(0, 1).items()}


def test_a_step_that_a_generation_goes_on_from_stays_until_it_is_copied_anew() -> None:
    """In a loop of one's own that step is copied once more. A rank may die before its neighbor has it."""
    neighbor, storage = Neighbor(), MemoryStorage()
    neighbor.go_on.set()
    first, tiers = with_neighbor(neighbor, storage, FIRST)
    assert first.begin(named(FIRST, 1), state(1), tiers).arrived.wait(LIMIT_S)
    first.leave()
    neighbor.go_on.clear()
    lineage, copied = FIRST.begin(1, 1), storage.copy()
    later, tiers = with_neighbor(neighbor, copied, lineage, last=first)
    making = later.begin(named(lineage, 1), state(1), tiers)
    assert making.copied.wait(LIMIT_S)
    assert parts_of(copied) == {1: {0, 1}}
    neighbor.go_on.set()
    assert making.arrived.wait(LIMIT_S)
    assert parts_of(copied) == {1: {0, 1}}
    assert weight_of(copied, named(lineage, 1)) == 1
    for step in (2, 3):
        assert later.begin(named(lineage, step), state(step), tiers).arrived.wait(LIMIT_S)
    assert parts_of(copied) == {2: {0, 1}, 3: {0, 1}}
    later.leave()


def test_memory_keeps_its_newest_complete_step_whatever_went_to_a_directory_since(tmp_path: Path) -> None:
    neighbor, storage = Neighbor(), MemoryStorage()
    neighbor.go_on.set()
    (tmp_path / "copies").mkdir(mode=0o700)
    made, (memory, directory) = with_neighbor(
        neighbor, storage, FIRST, LocalDirectory(tmp_path / "copies", copies=0)
    )
    assert made.begin(named(FIRST, 2), state(2), [memory]).arrived.wait(LIMIT_S)
    assert made.begin(named(FIRST, 3), state(3), [directory]).arrived.wait(LIMIT_S)
    neighbor.go_on.clear()
    making = made.begin(named(FIRST, 4), state(4), [memory])
    assert making.copied.wait(LIMIT_S)
    wait_until(lambda: 4 in parts_of(storage))
    assert parts_of(storage) == {2: {0, 1}, 4: {0}}
    neighbor.go_on.set()
    assert making.arrived.wait(LIMIT_S)
    made.leave()


def test_a_neighbor_that_is_gone_is_known_before_anybody_goes_on_and_holds_nothing() -> None:
    """No frame of the error and no task refers to live tensors: that would double the memory of a recovery."""
    neighbor, storage = Neighbor(), MemoryStorage()
    neighbor.error = RuntimeError("gone")
    made, tiers = with_neighbor(neighbor, storage, FIRST)
    given = state(1)
    live = weakref.ref(given.tensors["model", 0, "weight"])
    making = made.begin(named(FIRST, 1), given, tiers)
    del given
    assert making.copied.wait(LIMIT_S)
    wait_until(lambda: live() is None)
    neighbor.go_on.set()
    assert making.arrived.wait(LIMIT_S)
    assert made.error is neighbor.error
    made.leave()


def test_a_directory_that_does_not_answer_holds_up_no_other(tmp_path: Path) -> None:
    tiers = [LocalDirectory(tmp_path / "local", every=1, copies=0), SharedDirectory(tmp_path / "shared", every=1)]
    for name in ("local", "shared"):
        (tmp_path / name).mkdir(mode=0o700)
    storages = {tiers[0].name: GoneStorage(tmp_path / "local"), tiers[1].name: DiskStorage(tmp_path / "shared")}
    made = copying(tiers, storages, FIRST)
    try:
        assert made.begin(named(FIRST, 1), state(1), tiers).arrived.wait(LIMIT_S)
        wait_until(lambda: made.directories[tiers[1].name].outcome == "whole")
        assert made.directories[tiers[0].name].outcome == "busy"
    finally:
        GoneStorage.over.set()
        made.leave()
    wait_until(lambda: made.has_ended)


def test_what_was_there_before_stays_until_a_newer_copy_is_whole(tmp_path: Path) -> None:
    tiers = [LocalDirectory(tmp_path, every=1, copies=0)]
    (tmp_path / "copies").mkdir(mode=0o700)
    storage = DiskStorage(tmp_path / "copies")
    earlier = copying(tiers, {tiers[0].name: storage}, FIRST)
    assert earlier.begin(named(FIRST, 1), state(1), tiers).arrived.wait(LIMIT_S)
    wait_until(lambda: earlier.directories[tiers[0].name].outcome == "whole")
    earlier.leave()
    lineage = FIRST.begin(1, 1)
    later = copying(tiers, {tiers[0].name: storage}, lineage)
    wait_until(lambda: later.directories[tiers[0].name].present == {named(FIRST, 1)})
    assert later.begin(named(lineage, 2), state(2), tiers).arrived.wait(LIMIT_S)
    wait_until(lambda: later.directories[tiers[0].name].outcome == "whole")
    assert sorted(storage.shelf(0, 1)) == [named(FIRST, 1), named(lineage, 2)]
    later.leave()
    wait_until(lambda: earlier.has_ended and later.has_ended)
