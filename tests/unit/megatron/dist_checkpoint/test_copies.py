"""Which copies of checkpoints are kept, and which memory is used again for the next ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist

from checkpointless.integrations.megatron.dist_checkpoint import copies as copies_module
from checkpointless.integrations.megatron.dist_checkpoint.strategies import _in_storage_of_its_own
from checkpointless.megatron.dist_checkpoint import Copies
from checkpointless.replication.host_memory import HostMemoryPool
from checkpointless.replication.parts import Content, SaveId
from tests.waiting import wait_until

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


def written(content: Content | None) -> Content:
    assert content is not None
    return content


def kept(copies: Copies) -> dict[SaveId, set[float]]:
    """Return the values of the copies that are kept."""
    shelf = copies.stores["memory"].shelf(1)
    return {each: {*parts[0][0].read().content.tensors[0].tolist()} for each, parts in shelf.items()}


def test_the_newest_whole_checkpoint_and_the_one_being_written_are_kept() -> None:
    copies = Copies()
    save(copies, 0)
    save(copies, 1, is_whole=False)
    assert kept(copies) == {SAVES[0]: {0.0}}
    written(copies.keep(SAVES[2], Content.of({"weight": torch.full((5,), 2.0)})))
    wait_until(lambda: len(kept(copies)) == 2)  # it is brought in the background
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


def test_a_save_that_never_ends_leaves_nothing_behind() -> None:
    """NeMo does not schedule what another rank cannot save."""
    copies = Copies()
    save(copies, 0)
    written(copies.keep(SAVES[1], Content.of({"weight": torch.ones(5)})))
    save(copies, 2)
    save(copies, 3)
    assert kept(copies) == {SAVES[3]: {3.0}}
    assert not copies._writing


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

    def none(*_: object, **__: object) -> Content:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(HostMemoryPool, "content", none)
        assert copies.keep(SAVES[1], Content.of({"weight": torch.ones(5)})) is None
    copies.end(SAVES[1], is_whole=True)
    assert "no copy is kept of what rank 0 saves: no room" in caplog.text
    assert kept(copies) == {}, "the one before is not the newest any more"


@pytest.mark.parametrize("wrong", [{"replication_jump": -1}, {"replication_factor": 0}])
def test_numbers_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Copies(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 5)])
def test_a_tensor_gets_a_storage_of_its_own_over_the_same_memory(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    count = torch.Size(shape).numel()
    view = memory[256 : 256 + count * dtype.itemsize].view(dtype).view(shape)
    alone = _in_storage_of_its_own(view)
    assert alone.shape == view.shape
    assert alone.dtype == view.dtype
    assert alone.untyped_storage().size() == count * dtype.itemsize
    view.fill_(1)
    assert torch.equal(alone, view)


def test_an_exchange_that_was_late_does_not_keep_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "_EXCHANGE_S", 0.05)
    copies = Copies()
    made = copies.prepare()
    for number in range(4):
        late = threading.Event()
        made._lane.do(partial(_wait_for, late))
        save(copies, number)
        late.set()
        wait_until(lambda: made._lane.is_idle)
    assert not copies._writing


def _wait_for(event: threading.Event) -> None:
    assert event.wait(LIMIT_S)
