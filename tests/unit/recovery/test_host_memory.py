"""Test how tensors are moved to host memory that is used again; tensors of 32-bit floats play those of a device."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from checkpointless.state import held_state
from checkpointless.state.held_state import HostMemory
from checkpointless.transfer.tensor_entry import Key


@pytest.fixture(autouse=True)
def floats_lie_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_state, "_is_on_host", lambda tensor: tensor.dtype != torch.float32)


def key(name: str) -> Key:
    return ("optimizer", 0, 0, 0, name)


def test_copies_are_equal_and_do_not_overlap_and_the_rest_stays_where_it_is() -> None:
    tensors = {
        key("matrix"): torch.randn(7, 5).t(),
        key("nothing"): torch.randn(0, 3),
        key("odd"): torch.randn(3),
        key("here"): torch.arange(4),
    }
    copies = HostMemory().copies(tensors)
    assert copies.keys() == tensors.keys()
    assert all(torch.equal(copies[each], tensors[each]) for each in tensors)
    assert all(copies[each].shape == tensors[each].shape for each in tensors)
    assert copies[key("here")] is tensors[key("here")]
    copies[key("matrix")].fill_(0)
    assert torch.equal(copies[key("odd")], tensors[key("odd")])


def test_a_number_stays_where_it_is() -> None:
    step = torch.tensor(3.0)
    assert HostMemory().copies({key("step"): step})[key("step")] is step


def test_the_memory_is_used_again() -> None:
    memory = HostMemory()
    first = memory.copies({key("a"): torch.ones(100), key("b"): torch.ones(5)})
    again = memory.copies({key("a"): torch.zeros(90)})
    assert again[key("a")].data_ptr() == first[key("a")].data_ptr()
    assert len(memory._buffers) == 1


def test_what_was_copied_before_and_is_still_held_is_not_overwritten() -> None:
    memory = HostMemory()
    held = memory.copies({key("a"): torch.ones(100), key("b"): torch.full((5,), 2.0)})
    on_host = {each: copy.view(torch.int32) for each, copy in held.items()}  # they lie on the host
    before = {each: copy.clone() for each, copy in on_host.items()}
    mixed = memory.copies({key("a"): on_host[key("a")], key("b"): torch.full((5,), 7.0)})  # b was filled
    assert torch.equal(mixed[key("a")], before[key("a")])
    assert mixed[key("b")].tolist() == [7.0] * 5


def test_a_host_that_locks_no_pages_is_said_once_for_each_buffer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    locked: list[tuple[int, int]] = []

    def register(pointer: int, nbytes: int, flags: int) -> int:
        locked.append((pointer, nbytes))
        return 2

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    zeros = torch.zeros
    cleared: list[object] = []

    def launch(*size: int, device: str) -> torch.Tensor:
        cleared.append(device)
        return zeros(*size)

    monkeypatch.setattr(torch, "zeros", launch)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    memory = HostMemory()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            copies = memory.copies({key("a"): torch.ones(100)})
    assert cleared == ["cuda"], "else torch's next kernel would raise"
    assert locked == [(copies[key("a")].data_ptr(), 512)]
    assert caplog.text.count("512 bytes of host memory cannot be page-locked (error 2)") == 1
