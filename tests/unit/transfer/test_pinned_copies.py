"""Test that copies through pinned memory are whole, although they are done later and the memory is used again."""

from __future__ import annotations

import pytest
import torch

from checkpointless.transfer.bucket_rounds import _PinnedCopies

NBYTES = 16


class Stream:
    """Plays a device that makes a copy only when somebody waits for it."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0
        self.buffers = 0

    def allocate(self, size: int) -> torch.Tensor:
        """Return a buffer."""
        self.buffers += 1
        return torch.zeros(size, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy."""
        self.queue.append((target, source))

    def work_until(self, count: int) -> None:
        """Make all copies up to one."""
        for target, source in self.queue[self.done : count]:
            target.copy_(source)
        self.done = max(self.done, count)


class Event:
    """Plays an event of the stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._count = 0

    def record(self) -> None:
        """Record what was launched."""
        self._count = len(self._stream.queue)

    def synchronize(self) -> None:
        """Have it done."""
        self._stream.work_until(self._count)


@pytest.fixture
def stream() -> Stream:
    """Return a stream."""
    return Stream()


@pytest.fixture
def copies(stream: Stream) -> _PinnedCopies:
    """Return copies on the stream."""
    return _PinnedCopies(NBYTES, stream.allocate, lambda: Event(stream), stream.copy)


SIZES = [0, 1, 15, 16, 17, 32, 33, 100]


@pytest.mark.parametrize("size", SIZES)
def test_what_goes_to_the_device_is_what_was_on_the_host(stream: Stream, copies: _PinnedCopies, size: int) -> None:
    sources = [torch.arange(size, dtype=torch.uint8) + index for index in range(5)]
    expected = [source.clone() for source in sources]
    targets = [torch.zeros_like(source) for source in sources]
    for target, source in zip(targets, sources):
        copies.to_device(target, source)
        source.zero_()  # the caller is free to
    stream.work_until(len(stream.queue))
    assert all(map(torch.equal, targets, expected))
    assert stream.buffers <= 2


@pytest.mark.parametrize("size", SIZES)
def test_what_comes_to_the_host_is_there_when_it_has_settled(
    stream: Stream, copies: _PinnedCopies, size: int
) -> None:
    sources = [torch.arange(size, dtype=torch.uint8) + index + 1 for index in range(5)]
    targets = [torch.zeros_like(source) for source in sources]
    for target, source in zip(targets, sources):
        copies.to_host(target, source)
    copies.settle()
    assert all(map(torch.equal, targets, sources))
    assert stream.buffers <= 2


def test_both_ways_in_turn(stream: Stream, copies: _PinnedCopies) -> None:
    up, down = torch.arange(40, dtype=torch.uint8), torch.arange(40, dtype=torch.uint8) + 100
    on_device, on_host = torch.zeros_like(up), torch.zeros_like(down)
    copies.to_host(on_host, down)
    copies.to_device(on_device, up)
    copies.to_host(up, on_device)
    copies.settle()
    assert torch.equal(on_host, down)
    assert torch.equal(on_device, torch.arange(40, dtype=torch.uint8))
    assert torch.equal(up, on_device)


def test_the_host_waits_only_for_a_buffer_that_is_in_use(stream: Stream, copies: _PinnedCopies) -> None:
    source = torch.arange(NBYTES, dtype=torch.uint8)
    copies.to_device(torch.zeros_like(source), source)
    copies.to_device(torch.zeros_like(source), source)
    assert stream.done == 0
    copies.to_device(torch.zeros_like(source), source)
    assert stream.done == 1
