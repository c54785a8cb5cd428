"""Test what `import checkpointless` does to a process that only wanted a name from it."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ranks

_PROBE = """
import json, os, sys, threading

def sockets():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            pass  # the descriptor of the listing itself
    return sorted(link for link in links if link.startswith(("socket:", "anon_inode:")))

before = sockets(), threading.active_count(), len(os.listdir("/proc/self/task"))
import torch
torch_tasks = len(os.listdir("/proc/self/task"))
import checkpointless
for name in getattr(checkpointless, "__all__", ()):
    getattr(checkpointless, name)
after = sockets(), threading.active_count(), len(os.listdir("/proc/self/task"))
print(json.dumps({
    "before": before,
    "after": after,
    "torch_tasks": torch_tasks,
    "frameworks": sorted({name.partition(".")[0] for name in sys.modules}
                         & {"lightning", "pytorch_lightning", "nemo", "megatron", "rich"}),
}))
"""


def test_it_imports_no_framework_starts_no_thread_and_opens_no_socket() -> None:
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["frameworks"] == []
    assert seen["after"][0] == seen["before"][0]
    assert seen["after"][1] == seen["before"][1] == 1
    assert seen["after"][2] == seen["torch_tasks"]


def test_the_help_needs_neither_torch_nor_rich() -> None:
    probe = (
        "import sys; from checkpointless.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'rich', 'lightning', 'nemo'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout
    assert done.stderr.strip() == "[]"
