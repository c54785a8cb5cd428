"""Test the process that a rank's script is run in."""

import os
import subprocess
import sys
from pathlib import Path

from checkpointless.system.environment import RANK_ENV

RUN = """
import sys
from checkpointless.launcher.agent.ranks.rank_process import Script, run_script

run_script(Script(sys.argv[1]))
"""


INTERRUPTED = """
import atexit, os, signal, threading

atexit.register(print, "atexit has run")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
threading._register_atexit(os.kill, os.getpid(), signal.SIGINT)  # as of an executor: called when the script is over
"""


def test_what_atexit_has_runs_although_ctrl_c_comes_while_threads_are_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(INTERRUPTED)
    words, env = [sys.executable, "-c", RUN, str(script)], {**os.environ, RANK_ENV: "0"}
    ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=180)
    assert (ended.stdout, ended.returncode) == ("atexit has run\n", 1), ended.stderr
    assert "KeyboardInterrupt" in ended.stderr
