"""Test that a rehearsal calls exact what is, and says of what is not which point of the contract it breaks."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from tests.ranks.agent_job import SCRIPTS
from tests.ranks.nemo_zygote import ROOT, Zygote
from tests.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "rows.txt").write_text("192")
    return folder


def rehearse(zygote: Zygote, folder: Path, *words: str | Path) -> tuple[int, str]:
    """Rehearse in ``folder``; return the exit status, and what was said."""
    argv = ["rehearse", "--cpu", "--nproc-per-node", "2", *map(str, words)]
    (answer,) = zygote.run(
        1, "tests.ranks.docs_commands:command_here", {"argv": argv, "folder": str(folder)}, limit_s=240
    )
    return answer["code"], answer["out"]


def test_a_loop_is_exact_and_nothing_is_left_in_its_folder(nemo_zygote: Zygote, folder: Path) -> None:
    """It is longer than what is compared; it writes a checkpoint, and has epochs of 6 steps and validations."""
    script = shutil.copy(SCRIPTS / "contract_loop.py", folder)
    code, said = rehearse(nemo_zygote, folder, "--steps", "10", script, "400", "exact")
    assert code == 0, said
    assert said.rstrip().endswith("exact: 10 steps on 2 ranks, bit by bit, in 4 runs with a fault each"), said
    assert "an epoch's end" in said, said
    assert "a validation" in said, said
    assert sorted(path.name for path in folder.iterdir()) == ["contract_loop.py", "rows.txt"]


def test_a_loop_that_does_not_declare_is_inexact(nemo_zygote: Zygote, folder: Path) -> None:
    script = str(SCRIPTS / "contract_loop.py")
    runs = str(folder / "kept")
    words = ("--json", "--steps", "8", "--faults", "2", "--run-dir", runs, script, "8", "clip", "undeclared")
    code, said = rehearse(nemo_zygote, folder, *words)
    assert code == 1, said
    found = json.loads(said[said.index("{") :])
    assert found["verdict"] == "inexact"
    assert [each["outcome"] for each in found["faults"]] == ["inexact", "inexact"]
    assert found["faults"][0]["contract"] == [3]
    assert "average, norms" in found["faults"][0]["said"][0]
    assert "docs/contract.md, 3 (declared state)" in found["sentence"]
    assert (folder / "kept" / "fault-1" / "events.jsonl").is_file()


@pytest.mark.long
def test_attributes_of_a_lightning_module_are_compared(nemo_zygote: Zygote, folder: Path) -> None:
    """Epochs have 8 steps, and a validation comes after every fourth."""
    words = (SCRIPTS / "lightning_fit.py", "24", "ddp", "keeps-clip", "validation")
    code, said = rehearse(nemo_zygote, folder, "--steps", "14", *words)
    assert code == 0, said
    assert "exact: 14 steps on 2 ranks" in said, said
    assert "an epoch's end" in said, said
    assert "a validation" in said, said
    assert "Mean.hidden" in said, "the warning of what is left out is on the page"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        pytest.param("raises", "calm-1, which has no fault, failed: rank", marks=pytest.mark.long),
        ("unseeded", "the script is not deterministic"),
    ],
)
def test_a_script_that_differs_or_fails_by_itself_is_not_rehearsed(
    nemo_zygote: Zygote, folder: Path, kind: str, why: str
) -> None:
    code, said = rehearse(nemo_zygote, folder, str(SCRIPTS / "contract_loop.py"), "6", kind)
    assert code == 3, said
    assert why in said.rstrip().splitlines()[-1], said
    assert "fault-1" not in said


@pytest.mark.long  # unit/rehearsal/test_judge.py has the verdict
def test_a_script_that_resumes_from_another_run_is_not_rehearsed(nemo_zygote: Zygote, folder: Path) -> None:
    """The runs without faults find nothing yet, or what the other one has written, some of their ranks or all."""
    steps, script = ["--faults", "1", "--steps", "6"], [str(SCRIPTS / "contract_loop.py"), "9"]
    code, said = rehearse(nemo_zygote, folder, *steps, *script, "resumes", str(folder / "last.pt"))
    assert code == 3, said
    last = said.rstrip().splitlines()[-1]
    assert "the script resumes from a checkpoint" in last or "load the same checkpoint on every rank" in last, said


@pytest.mark.long  # test_agent_ends.py interrupts a job
def test_ctrl_c_ends_all_jobs(folder: Path, tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "checkpointless", "rehearse", str(SCRIPTS / "contract_loop.py"), "60", "slow"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MARKER": marker, "TMPDIR": str(tmp_path / "tmp")},
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell ignores it for jobs in the background
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = ""
    while re.search(r"step \d+ is made", said) is None:
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGINT)
    assert process.wait(180) == 130, said + process.stderr.read()
    assert "stopped by Ctrl-C" in process.stderr.read()
    wait_until(lambda: _marked(marker) == [])
    assert list((tmp_path / "tmp").glob("checkpointless-rehearsal-*")) == []


def _marked(marker: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARKER") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
