"""Which copies of checkpoints are kept, and which memory is used again for the next ones."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist

from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.memory_storage import MemoryStorage
from checkpointless.local_checkpoint.part_id import PartId, SaveId
from checkpointless.local_checkpoint.part_storage import read_any
from checkpointless.megatron.dist_checkpoint import Copies, keeper
from checkpointless.megatron.dist_checkpoint.keeper import Kept, in_storage_of_its_own

pytestmark = pytest.mark.nemo
LIMIT_S = 30.0
SAVES = [SaveId(number, f"{number:024x}") for number in range(6)]


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save(copies: Copies, number: int, is_whole: bool = True) -> torch.Tensor:
    """Save a tensor that is ``number`` everywhere, and return its copy, whose memory is used again later."""
    live = torch.full((2 << 20,), float(number))
    content = written(copies.keep(SAVES[number], Content.of({"weight": live})))
    live.fill_(-1.0)  # training goes on
    copies.end(SAVES[number], is_whole)
    (weight,) = content.tensors
    return weight


def written(kept: Kept) -> Content:
    """Let a forked process copy what is to be kept, as the one does that writes a checkpoint."""
    assert kept.content is not None
    assert kept.later is not None
    process = multiprocessing.get_context("fork").Process(target=kept.later.before(lambda: None))
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0
    return kept.content


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def kept(copies: Copies) -> dict[SaveId, set[float]]:
    """Return the values of the copies that are kept."""
    shelf = copies.places[0].storage.shelf(0, 1)
    contents = {each: read_any(parts[0]) for each, parts in shelf.items()}
    return {each: {*content.tensors[0].tolist()} for each, content in contents.items() if content is not None}


def test_the_newest_whole_checkpoint_and_the_one_being_written_are_kept() -> None:
    copies = Copies()
    save(copies, 0)
    save(copies, 1, is_whole=False)
    assert kept(copies) == {SAVES[0]: {0.0}}
    written(copies.keep(SAVES[2], Content.of({"weight": torch.full((5,), 2.0)})))
    copies.prepare().end(SAVES[2])
    assert kept(copies) == {SAVES[0]: {0.0}, SAVES[2]: {2.0}}
    copies.end(SAVES[2], is_whole=True)
    assert kept(copies) == {SAVES[2]: {2.0}}


def test_two_pieces_of_memory_are_used_in_turn() -> None:
    copies = Copies()
    pieces = []
    for number in range(6):
        pieces.append(save(copies, number).data_ptr())
        assert kept(copies) == {SAVES[number]: {float(number)}}
    assert len(set(pieces)) == 2


class SlowStorage(MemoryStorage):
    """A place that takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def write(self, parts: Sequence[tuple[PartId, Content]], holder: int, world_size: int) -> None:
        """Write when it is told to."""
        assert self.go_on.wait(LIMIT_S)
        super().write(parts, holder, world_size)


def test_training_waits_for_nothing_but_the_copy_in_memory() -> None:
    slow = SlowStorage()
    copies = Copies(disk=slow)
    live = torch.full((5,), 1.0)
    written(copies.keep(SAVES[1], Content.of({"weight": live})))
    live.fill_(-1.0)
    assert not slow.shelf(0, 1)
    slow.go_on.set()  # it is waited for, for a while
    copies.end(SAVES[1], is_whole=True)
    content = read_any(slow.shelf(0, 1)[SAVES[1]][0])
    assert content is not None
    assert content.tensors[0].tolist() == [1.0] * 5


def test_a_place_that_does_not_answer_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "_WRITE_S", 0.1)
    slow = SlowStorage()
    copies = Copies(disk=slow)
    with caplog.at_level(logging.WARNING):
        save(copies, 0)
        assert "were not written within 0.1 s" in caplog.text
        caplog.clear()
        save(copies, 1)
    assert "is not kept in disk: the one before is still written" in caplog.text
    assert "within" not in caplog.text
    assert kept(copies) == {SAVES[1]: {1.0}}
    slow.go_on.set()
    wait_until(lambda: not slow.shelf(0, 1))
    wait_until(lambda: not any(copies.prepare()._writing.values()))  # it is removed before its writer is free
    monkeypatch.setattr(keeper, "_WRITE_S", 60.0)
    save(copies, 2)
    assert slow.shelf(0, 1).keys() == {SAVES[2]}


def test_a_save_that_never_ends_leaves_nothing_behind() -> None:
    """NeMo does not schedule what another rank cannot save."""
    copies = Copies()
    save(copies, 0)
    assert copies.keep(SAVES[1], Content.of({"weight": torch.ones(5)})).later is not None
    save(copies, 2)
    save(copies, 3)
    assert kept(copies) == {SAVES[3]: {3.0}}
    assert copies.prepare()._saves.keys() == {SAVES[2], SAVES[3]}


def test_several_that_are_being_written_are_all_kept() -> None:
    copies = Copies()
    save(copies, 0)
    for number in (1, 2, 3):
        written(copies.keep(SAVES[number], Content.of({"weight": torch.full((5,), float(number))})))
    wait_until(lambda: kept(copies).keys() == {*SAVES[:4]})  # they are brought in the background
    for number in (1, 2, 3):
        copies.end(SAVES[number], is_whole=True)
        assert kept(copies) == {SAVES[each]: {float(each)} for each in range(number, 4)}


def test_memory_that_is_not_there_costs_the_copy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copies = Copies()
    save(copies, 0)

    def none(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(torch, "frombuffer", none)
        assert copies.keep(SAVES[1], Content.of({"weight": torch.ones(5)})).content is None
    copies.end(SAVES[1], is_whole=True)
    assert "no copy is kept of what rank 0 saves: no room" in caplog.text
    assert kept(copies) == {}, "the one before is not the newest any more"


def test_a_writer_that_dies_before_it_copies_costs_the_copy(caplog: pytest.LogCaptureFixture) -> None:
    copies = Copies()
    save(copies, 0)
    assert copies.keep(SAVES[1], Content.of({"weight": torch.ones(5)})).later is not None
    with caplog.at_level(logging.WARNING):
        copies.end(SAVES[1], is_whole=False)
    assert "no copy is kept of" in caplog.text
    assert kept(copies) == {SAVES[0]: {0.0}}


def test_a_writer_that_is_not_forked_gets_a_state_that_was_copied_before() -> None:
    copies = Copies()
    live = torch.full((5,), 1.0)
    given = copies.keep(SAVES[1], Content.of({"weight": live}))
    assert given.later is not None
    assert given.content is not None
    sent = ForkingPickler.dumps(given.later.before(print))
    live.fill_(-1.0)
    assert pickle.loads(sent) is print
    assert given.content.tensors[0].tolist() == [1.0] * 5


@pytest.mark.parametrize("wrong", [{"replication_jump": -1}, {"replication_factor": 0}])
def test_numbers_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Copies(**wrong)  # type: ignore[arg-type]


def test_ranks_that_cannot_be_divided_are_refused_before_a_save() -> None:
    with pytest.raises(ValueError, match="1 ranks cannot be divided into cliques of 2"):
        Copies(replication_jump=1, replication_factor=2).prepare()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 5)])
def test_a_tensor_gets_a_storage_of_its_own_over_the_same_memory(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    count = torch.Size(shape).numel()
    view = memory[256 : 256 + count * dtype.itemsize].view(dtype).view(shape)
    alone = in_storage_of_its_own(view)
    assert alone.shape == view.shape
    assert alone.dtype == view.dtype
    assert alone.untyped_storage().size() == count * dtype.itemsize
    view.fill_(1)
    assert torch.equal(alone, view)


def test_an_exchange_that_was_late_does_not_keep_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_EXCHANGE_S", 0.05)
    copies = Copies()
    made = copies.prepare()
    for number in range(4):
        late = threading.Event()
        made._lane.do(partial(_wait_for, late))
        save(copies, number)
        late.set()
        wait_until(lambda: made._lane.is_idle)
    assert len(made._saves) <= 2


def _wait_for(event: threading.Event) -> None:
    assert event.wait(LIMIT_S)
