"""Test that Lightning's own strategies need Lightning and torch alone."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys

for name in ("nemo", "nemo_run", "megatron"):
    sys.modules[name] = None  # an import of it fails
from checkpointless.strategies import CheckpointlessDDPStrategy, CheckpointlessModelParallelStrategy
from checkpointless.integrations.lightning.recoverable_fit import RecoverableFit

print(CheckpointlessDDPStrategy.__name__, CheckpointlessModelParallelStrategy.__name__, RecoverableFit.__name__)
"""


def test_lightnings_strategies_need_no_nemo() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.split() == [
        "CheckpointlessDDPStrategy",
        "CheckpointlessModelParallelStrategy",
        "RecoverableFit",
    ], ended.stderr
