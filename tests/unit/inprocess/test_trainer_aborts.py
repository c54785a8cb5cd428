"""Test what a script imports with the aborts and with Lightning's own strategies, and what not."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys

for name in ("nemo", "nemo_run", "megatron"):
    sys.modules[name] = None  # an import of it fails
from checkpointless.inprocess import HPDataLoaderAbort
from checkpointless.inprocess import abort
assert "checkpointless.callbacks" not in sys.modules and not abort._known
class Trainer: pass
mine = Trainer()
HPDataLoaderAbort().register_attributes(mine)
print(*abort._known)
from checkpointless.strategies import CheckpointlessDDPStrategy, CheckpointlessModelParallelStrategy

print(CheckpointlessDDPStrategy.__name__, CheckpointlessModelParallelStrategy.__name__)
"""


@pytest.mark.slow
def test_aborts_find_the_parts_of_a_trainer_without_callbacks_and_lightnings_strategies_need_no_nemo() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == [
        "lightning",
        "CheckpointlessDDPStrategy",
        "CheckpointlessModelParallelStrategy",
    ], done.stderr
