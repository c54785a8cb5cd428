"""Copies of one generation: what its threads still do after a fault spoils nothing of the next generation's."""

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointless.inprocess.communicators.helper_thread import run_in_helper_thread
from checkpointless.replication import DirectoryStore, MemoryStore, PartStore, copier
from checkpointless.replication.copier import Copier, Making, Place, _Lane
from checkpointless.replication.host_memory import HostMemoryPool
from checkpointless.replication.parts import Content, Part, PartId, SaveId
from checkpointless.replication.store import _PartFile
from checkpointless.replication.tiers import Copies, _Lineage
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("alone")

LIMIT_S = 120.0  # a loaded disk syncs for seconds
FIRST = _Lineage("0" * 16).begin(0, 0)
#: What the copies of tiers keep.
keep = Copies()._of_use


class SlowStore(DirectoryStore):
    """A directory that answers when it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked, self.go_on = threading.Event(), threading.Event()

    def write(self, part: Part, holder: int) -> None:
        self.asked.set()
        assert self.go_on.wait(LIMIT_S)
        super().write(part, holder)


class GoneStore(DirectoryStore):
    """A directory that does not answer before the test is over."""

    over = threading.Event()

    def shelf(self, world_size: int) -> dict[SaveId, dict[int, list[_PartFile]]]:
        self.over.wait(LIMIT_S)
        raise OSError("gone")


class Neighbor:
    """Stands for an exchange with one neighbor, which gives its part when it is told to, or fails."""

    members = 0, 1

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.error: Exception | None = None

    def exchange(self, part: Part | None, pool: HostMemoryPool) -> Iterator[tuple[int, Part]]:
        assert self.go_on.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        assert part is not None
        theirs = Part(PartId(part.id.save, 1), 2, part.content, part.digests)
        yield 1, Part.described(theirs.header(), pool.content)


def memory(store: MemoryStore, neighbor: Neighbor | None = None, present: frozenset[SaveId] = frozenset()) -> Place:
    exchange: Any = neighbor
    return Place("memory", store, True, exchange, present)


def made_copier(lineage: _Lineage, *places: Place) -> Copier:
    return Copier("copying", places, keep, lineage.has)


def begin(by: Copier, save: SaveId, value: float, *places: Place) -> tuple[Making, Callable[[], object]]:
    """Begin to copy a state, and return a reference to its live tensor, too."""
    live = [torch.full((1000,), value)]

    def take() -> Content:
        copied = by.pool.copy(Content(b"", tuple(live)))
        live.clear()
        return copied

    return by.begin(save, take, places), weakref.ref(live[0])


def copied(by: Copier, save: SaveId, value: float, *places: Place) -> Making:
    """Copy a state, and wait until it has arrived."""
    making, _ = begin(by, save, value, *places)
    assert making.arrived.wait(LIMIT_S)
    return making


def named(lineage: _Lineage, step: int) -> SaveId:
    save = lineage.save(step)
    assert save is not None
    return save


def value_of(store: PartStore, save: SaveId) -> float:
    """Return the one value that all elements of a stored state have."""
    (values,) = store.shelf(1)[save][0][0].read().content.tensors
    assert torch.equal(values, values[:1].expand(1000))
    return float(values[0])


def parts_of(store: PartStore) -> dict[int, set[int]]:
    """Return by step the ranks whose parts are there."""
    return {save.iteration: {*parts} for save, parts in store.shelf(1).items()}


def test_a_write_that_a_fault_leaves_is_of_the_bytes_that_it_began_with(tmp_path: Path) -> None:
    """Two later generations copy other steps while the first one's writer is stuck."""
    slow, store = SlowStore(tmp_path / "copies"), DirectoryStore(tmp_path / "copies")
    stuck = Place("directory", slow)
    first = made_copier(FIRST, stuck)
    copied(first, named(FIRST, 1), 1, stuck)
    assert slow.asked.wait(LIMIT_S)
    first.leave()
    assert first.unfinished == ["directory"]
    lineage = FIRST
    for generation in (1, 2):
        lineage = lineage.begin(generation, 1)
        place = Place("directory", store)
        later = made_copier(lineage, place)
        making = copied(later, named(lineage, 2), 10 * generation, place)
        wait_until(lambda making=making: making.written.is_set())  # type: ignore[misc]
        assert value_of(store, named(lineage, 2)) == 10 * generation
        later.leave()
    slow.go_on.set()
    wait_until(lambda: first.has_ended)
    assert value_of(store, named(FIRST, 1)) == 1


def test_a_step_that_a_generation_goes_on_from_stays_until_it_is_copied_again() -> None:
    """In a loop of one's own that step is copied once more. A rank may die before its neighbor has it."""
    neighbor, store = Neighbor(), MemoryStore()
    neighbor.go_on.set()
    before = memory(store, neighbor)
    first = made_copier(FIRST, before)
    copied(first, named(FIRST, 1), 1, before)
    first.leave()
    neighbor.go_on.clear()
    lineage, store = FIRST.begin(1, 1), store.copy()
    place = memory(store, neighbor, before.present)
    later = made_copier(lineage, place)
    making, _ = begin(later, named(lineage, 1), 1, place)
    assert making.copied.wait(LIMIT_S)
    assert parts_of(store) == {1: {0, 1}}
    neighbor.go_on.set()
    assert making.arrived.wait(LIMIT_S)
    assert parts_of(store) == {1: {0, 1}}
    assert value_of(store, named(lineage, 1)) == 1
    for step in (2, 3):
        copied(later, named(lineage, step), step, place)
    assert parts_of(store) == {2: {0, 1}, 3: {0, 1}}
    later.leave()


def test_memory_keeps_its_newest_complete_step_whatever_went_to_a_directory_since(tmp_path: Path) -> None:
    neighbor, store = Neighbor(), MemoryStore()
    neighbor.go_on.set()
    place, directory = memory(store, neighbor), Place("directory", DirectoryStore(tmp_path / "copies"))
    made = made_copier(FIRST, place, directory)
    copied(made, named(FIRST, 2), 2, place)
    copied(made, named(FIRST, 3), 3, directory)
    neighbor.go_on.clear()
    making, _ = begin(made, named(FIRST, 4), 4, place)
    assert making.copied.wait(LIMIT_S)
    wait_until(lambda: 4 in parts_of(store))
    assert parts_of(store) == {2: {0, 1}, 4: {0}}
    neighbor.go_on.set()
    assert making.arrived.wait(LIMIT_S)
    made.leave()


def test_a_neighbor_that_is_gone_is_known_before_anybody_goes_on_and_holds_nothing() -> None:
    """No frame of the error and no task refers to live tensors: that would double the memory of a recovery."""
    neighbor = Neighbor()
    neighbor.error = RuntimeError("gone")
    place = memory(MemoryStore(), neighbor)
    made = made_copier(FIRST, place)
    making, live = begin(made, named(FIRST, 1), 1, place)
    assert making.copied.wait(LIMIT_S)
    wait_until(lambda: live() is None)
    neighbor.go_on.set()
    assert making.arrived.wait(LIMIT_S)
    assert made.error is making.error is neighbor.error
    assert not made.can_exchange
    made.leave()


def test_a_directory_that_does_not_answer_holds_up_no_other(tmp_path: Path) -> None:
    gone = Place("gone", GoneStore(tmp_path / "gone"))
    other = Place("other", DirectoryStore(tmp_path / "other"))
    made = made_copier(FIRST, gone, other)
    try:
        copied(made, named(FIRST, 1), 1, gone, other)
        wait_until(lambda: other.present == {named(FIRST, 1)})
        assert (gone.is_busy, other.is_busy) == (True, False)
    finally:
        GoneStore.over.set()
        made.leave()
    wait_until(lambda: made.has_ended)


# --- lanes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_left", "fails"), [(False, True), (True, True), (True, False)])
def test_no_task_of_a_lane_begins_after_an_error_which_is_logged_or_after_it_was_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_left: bool, fails: bool
) -> None:
    monkeypatch.setattr(copier, "_LEAVING_S", 0.05)
    lane, begun, go_on, done = _Lane("copying"), threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        begun.set()
        go_on.wait(LIMIT_S)
        if fails:
            raise RuntimeError("a disk is gone")

    lane.do(first)
    lane.do(lambda: done.append("later"))
    assert begun.wait(LIMIT_S)
    assert not lane.is_idle
    if is_left:
        lane.leave()
    go_on.set()
    wait_until(lambda: lane.has_ended)
    words = "copying: no task is done any more until the next recovery: a disk is gone"
    assert (lane.is_idle, done, words in caplog.text) == (True, [], not is_left)


def test_a_call_that_does_not_return_is_not_waited_for_for_ever() -> None:
    go_on = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within"):
        run_in_helper_thread(lambda: go_on.wait(LIMIT_S), 0.05)
    go_on.set()
    assert run_in_helper_thread(lambda: 3, LIMIT_S) == 3
    with pytest.raises(ZeroDivisionError):
        run_in_helper_thread(lambda: 1 / 0, LIMIT_S)
