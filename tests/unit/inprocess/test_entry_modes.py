"""A block that a fault has left finds torch's modes and the working directory as at its first entry."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
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


def test_a_relative_chdir_leads_to_the_same_folder_at_each_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = EntryModes.capture()
    for _ in range(2):
        os.makedirs("outputs", exist_ok=True)
        os.chdir("outputs")
        assert Path.cwd() == tmp_path / "outputs"
        before.restore()


def test_a_working_directory_that_is_gone_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    before = EntryModes.capture()
    os.chdir(tmp_path)
    before.restore()
    assert Path.cwd() == tmp_path
