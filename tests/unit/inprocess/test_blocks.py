"""Test where a block is entered: not in a child process that imports the script before it does its work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import multiprocessing as mp
from checkpointless import HPWrapper

def work(queue):
    queue.put("worked")

@HPWrapper({settings})
def main():
    return "entered"

def inner(queue):
    from checkpointless.inprocess.wrap import _is_imported_by_child
    queue.put(_is_imported_by_child(inner))

if mp.current_process().name == "MainProcess":
    context = mp.get_context("{method}")
    for target, wanted in ((work, "worked"), (inner, False)):
        queue = context.Queue()
        process = context.Process(target=target, args=(queue,))
        process.start()
        assert queue.get(timeout=240) == wanted
        process.join()
else:
    assert main() is None
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_no_block_is_entered_where_a_child_imports_the_script(tmp_path: Path, method: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(settings="", method=method))
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "under `if __name__" in ended.stderr
