"""Test the checks of variables, folders and descriptors, what they find, and what becomes of one that fails."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from checkpointless.doctor import node
from checkpointless.doctor.findings import Family, Finding, Severity, worst_first
from checkpointless.doctor.node import _checked, _open_files
from checkpointless.system.nccl import SETTINGS

UNLIMITED = resource.RLIM_INFINITY


def of(name: str, environ: dict[str, str]) -> Finding:
    (found,) = [each for each in node._variables(environ) if each.seen.startswith(f"{name}=")]
    return found


@pytest.mark.parametrize(("name", "value"), [(name, "3") for name in SETTINGS] + [("NCCL_NVLS_ENABLE", "1")])
def test_a_harmful_value_is_named_with_what_it_costs(name: str, value: str) -> None:
    found = of(name, {name: value})
    assert found.severity is Severity.WARNING
    assert found.seen == f"{name}={value}: {SETTINGS[name].otherwise}"
    assert (found.source, found.todo) == ("this environment", f"unset {name}")
    assert of(name, {name: SETTINGS[name].value}).severity is Severity.OK


def test_a_folder_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    fine = node._folder(tmp_path, 1, "here", "free it")
    assert (fine.severity, fine.source, fine.todo) == (Severity.OK, "here", "")
    full = node._folder(tmp_path, 10**18, "here", "free it")
    assert (full.severity, full.todo) == (Severity.WARNING, "free it")
    assert " of it free" in full.seen
    missing = node._folder(tmp_path / "not", 1, "here", "free it")
    assert (missing.severity, missing.seen) == (
        Severity.ERROR,
        f"{tmp_path / 'not'} cannot be written: No such file or directory",
    )
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_of_a_container_is_measured(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    shown = f"print(node._shared_memory(pathlib.Path({str(tmp_path)!r})))"
    code = f"import pathlib; from checkpointless.doctor import node; {shown}"
    command = f"mount -t tmpfs -o size=32m none {tmp_path} && exec {sys.executable} -c {code!r}"
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True).returncode != 0:
        pytest.skip("no mount namespace can be made here")
    done = subprocess.run([unshare, "-rm", "sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert "has 33.6 MB, 33.6 MB of it free" in done.stdout, done.stderr
    assert "NCCL and data-loader workers die of SIGBUS" in done.stdout


@pytest.mark.parametrize(
    ("files", "hard", "severity", "todo"),
    [
        (65536, 65536, Severity.OK, ""),
        (UNLIMITED, UNLIMITED, Severity.OK, ""),
        (1024, 2048, Severity.OK, ""),
        (100, 65536, Severity.ERROR, "ulimit -n 65536 "),
        (512, 4096, Severity.WARNING, "ulimit -n 4096 "),
        (512, UNLIMITED, Severity.WARNING, "ulimit -n 65536 "),
        (512, 512, Severity.WARNING, "limits.conf"),
    ],
)
def test_descriptors(files: int, hard: int, severity: Severity, todo: str) -> None:
    found = _open_files(files, hard, 8)
    assert found.severity is severity
    assert todo in found.todo


def test_a_check_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(cpu: bool) -> None:
        raise RuntimeError("no metadata")

    monkeypatch.setattr(node, "_versions", fails)
    said: list[str] = []
    found = node.examine(ranks=1, run_dir=None, cpu=True, preload=(), script=None, progress=said.append)
    assert "the check failed: RuntimeError: no metadata" in {each.seen for each in found}
    assert {each.family for each in found} == set(Family)
    assert said == ["asking torch for its versions, in a child process"]


OK = Finding(Family.VERSIONS, Severity.OK, "fine")
ADVICE = Finding(Family.LIMITS, Severity.ADVICE, "could be better", "ulimit", "do it")
WARNING = Finding(Family.VARIABLES, Severity.WARNING, "slow", "clock", "set it")
ERROR = Finding(Family.STORAGE, Severity.ERROR, "full", "disk", "free it")


def test_the_worst_comes_first() -> None:
    assert worst_first([OK, ADVICE, WARNING, ERROR]) == [ERROR, WARNING, ADVICE, OK]
    earlier = Finding(Family.VERSIONS, Severity.WARNING, "old")
    assert worst_first([WARNING, earlier]) == [earlier, WARNING]


def test_a_finding_is_one_line_of_a_terminal() -> None:
    assert ERROR.headline == "error: full: free it"
    assert Finding(Family.VARIABLES, Severity.OK, "a\x1b[2J\nb").headline == "ok: a\\x1b[2J b"


def test_a_check_that_fails_is_a_finding() -> None:
    def fails() -> list[Finding]:
        raise RuntimeError("no\nsuch thing")

    (found,) = _checked(Family.VERSIONS, fails, 10.0)
    assert (found.family, found.severity) == (Family.VERSIONS, Severity.WARNING)
    assert found.seen == "the check failed: RuntimeError: no such thing"
    assert found.todo


def test_a_check_that_does_not_end_is_a_finding() -> None:
    forever = threading.Event()
    try:
        (found,) = _checked(Family.STORAGE, lambda: [OK] * forever.wait(60.0), 0.05)
    finally:
        forever.set()
    assert found.seen == "the check did not end within 0.05 s"
    assert _checked(Family.VERSIONS, lambda: [OK], 10.0) == [OK]
