"""Check that aborts find the parts of a trainer, whatever the script has imported."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_parts_of_a_trainer_are_found_without_an_import_of_callbacks() -> None:
    code = """
import sys
from checkpointless.inprocess import HPDataLoaderAbort
from checkpointless.inprocess import abort
assert "checkpointless.callbacks" not in sys.modules and not abort._known
class Trainer: pass
mine = Trainer()
HPDataLoaderAbort().register_attributes(mine)
print(list(abort._known))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "['lightning']"
