"""Test copies of buffers that code outside of the steps has replaced."""

from typing import Any

import torch

from checkpointless.state.module_tensors import BufferCopies

_LARGE = 1 << 19  # elements: more than is copied each time


def test_buffers_that_a_validation_replaced_in_inference_mode_are_copied_and_put_back() -> None:
    """Lightning validates in that mode, in which ``self.seen = self.seen + 1`` makes a tensor without a version."""
    module: Any = torch.nn.Module()
    module.register_buffer("seen", torch.zeros(()))
    module.register_buffer("cache", torch.zeros(_LARGE))
    copies = BufferCopies([module])
    copies.take()
    with torch.inference_mode():
        module.seen = module.seen + 1
        module.cache = module.cache + 1
    taken = copies.take()
    assert [float(each.max()) for each in taken.values()] == [1, 1]
    with torch.inference_mode():
        module.cache.add_(1)  # which no version tells
    assert [float(each.max()) for each in copies.take().values()] == [1, 2]
    copies.put(taken)
    assert (float(module.seen), float(module.cache.max())) == (1, 1)
    module.seen.add_(1)  # they are plain tensors again
    assert [float(each.max()) for each in copies.take().values()] == [2, 1]
