"""Test that NeMo's strategy trains on CPUs also where a script imports NeMo after the platform was installed."""

from __future__ import annotations

import sys

import pytest
import torch

from checkpointless.integrations.megatron import cpu_platform

pytestmark = pytest.mark.nemo

CHECKPOINT_IO = "nemo.lightning.io.pl"


def test_a_script_that_imports_nemo_itself_loads_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """``checkpointless run --cpu`` installs the platform before the script runs."""
    strategies = pytest.importorskip("nemo.lightning.pytorch.strategies")
    from checkpointless.strategies import CheckpointlessMegatronStrategy

    with monkeypatch.context() as before:
        before.delitem(sys.modules, CHECKPOINT_IO)
        cpu_platform.install()
    checkpoint = {"weight": torch.zeros(2)}
    try:
        with pytest.raises(AssertionError):
            sys.modules[CHECKPOINT_IO]._fix_tensors_device(checkpoint)
        monkeypatch.setattr(strategies.MegatronStrategy, "setup_environment", lambda self: None)
        CheckpointlessMegatronStrategy().setup_environment()
        assert sys.modules[CHECKPOINT_IO]._fix_tensors_device(checkpoint) is checkpoint
    finally:
        cpu_platform.uninstall()
