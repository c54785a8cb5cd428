"""Copies of one generation: what its threads still do after a fault spoils nothing of the next generation's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

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
    return Copying(tiers, storages, {}, {}, lineage, {})


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
