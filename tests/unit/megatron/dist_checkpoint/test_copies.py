"""Which copies of checkpoints are kept, and which memory is used again for the next ones."""

from __future__ import annotations

import threading

import pytest
import torch

from checkpointless.integrations.megatron.dist_checkpoint import copies as copies_module
from checkpointless.megatron.dist_checkpoint import Copies
from checkpointless.replication import MemoryStore, register_store
from checkpointless.replication.parts import Content, Part, SaveId
from tests.waiting import wait_until

pytestmark = [pytest.mark.nemo, pytest.mark.usefixtures("alone")]
LIMIT_S = 30.0
SAVES = [SaveId(number, f"{number:024x}") for number in range(6)]


def save(copies: Copies, number: int, is_whole: bool = True) -> torch.Tensor:
    """Save a tensor that is ``number`` everywhere, and return its copy, whose memory is used again later."""
    live = torch.full((2 << 20,), float(number))
    content = begin(copies, number, live)
    live.fill_(-1.0)  # training goes on
    copies.end(SAVES[number], is_whole)
    (weight,) = content.tensors
    return weight


def begin(copies: Copies, number: int, weight: torch.Tensor) -> Content:
    content = copies.keep(SAVES[number], Content.of({"weight": weight}))
    assert content is not None
    return content


def kept(copies: Copies) -> dict[SaveId, set[float]]:
    shelf = copies.stores["memory"].shelf(1)
    return {each: {*parts[0][0].read().content.tensors[0].tolist()} for each, parts in shelf.items()}


def test_the_newest_whole_checkpoint_and_the_one_being_written_are_kept() -> None:
    copies = Copies()
    save(copies, 0)
    save(copies, 1, is_whole=False)
    assert kept(copies) == {SAVES[0]: {0.0}}
    begin(copies, 2, torch.full((5,), 2.0))
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


class SlowStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def write(self, part: Part, holder: int) -> None:
        assert self.go_on.wait(LIMIT_S)
        super().write(part, holder)


@pytest.fixture
def slow() -> SlowStore:
    store = SlowStore()
    register_store("slow", lambda name: store)
    return store


def test_training_waits_for_nothing_but_the_copy_in_memory(slow: SlowStore) -> None:
    copies = Copies(disk="slow://")
    live = torch.full((5,), 1.0)
    begin(copies, 1, live)
    live.fill_(-1.0)
    assert not slow.shelf(1)
    slow.go_on.set()  # it is waited for, for a while
    copies.end(SAVES[1], is_whole=True)
    (copy,) = slow.shelf(1)[SAVES[1]][0]
    assert copy.read().content.tensors[0].tolist() == [1.0] * 5


def test_a_place_that_does_not_answer_is_waited_for_once(
    slow: SlowStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copies_module, "_WRITE_S", 0.1)
    copies = Copies(disk="slow://")
    save(copies, 0)
    assert "were not written within 0.1 s" in caplog.text
    caplog.clear()
    save(copies, 1)
    assert "is not kept in disk: the one before is still written" in caplog.text
    assert "within" not in caplog.text
    assert kept(copies) == {SAVES[1]: {1.0}}
    slow.go_on.set()
    wait_until(lambda: not slow.shelf(1))
    wait_until(lambda: not copies._places[1].is_busy)
    monkeypatch.setattr(copies_module, "_WRITE_S", 60.0)
    save(copies, 2)
    assert slow.shelf(1).keys() == {SAVES[2]}


def test_a_save_that_never_ends_leaves_nothing_behind() -> None:
    """NeMo does not schedule what another rank cannot save."""
    copies = Copies()
    save(copies, 0)
    begin(copies, 1, torch.ones(5))
    save(copies, 2)
    save(copies, 3)
    assert kept(copies) == {SAVES[3]: {3.0}}
    assert not copies._writing
