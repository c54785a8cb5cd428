"""A block that a fault has left finds torch's modes as at its first entry."""

from __future__ import annotations

import torch

from checkpointless.inprocess.block.entry_modes import EntryModes


def test_modes_that_were_changed_for_a_while_are_as_before() -> None:
    before = EntryModes.capture()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        assert EntryModes.capture() != before
    finally:
        before.restore()
    assert EntryModes.capture() == before
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float32, True)
    assert not torch.is_autocast_enabled("cpu")
