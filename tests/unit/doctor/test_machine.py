"""Test the checks of versions, variables, folders and descriptors, and what becomes of one that fails."""

import platform
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from checkpointless.doctor import node
from checkpointless.doctor.findings import Family, Finding, Severity, worst_first
from checkpointless.doctor.node import _checked, _needed, _open_files, _Torch, _torch, _versions
from checkpointless.system.nccl import SETTINGS

UNLIMITED = resource.RLIM_INFINITY


def of(name: str, environ: dict[str, str]) -> Finding:
    (found,) = [each for each in node._variables(environ) if each.seen.startswith(f"{name}=")]
    return found


@pytest.mark.parametrize(("name", "value"), [(name, "3") for name in SETTINGS] + [("NCCL_NVLS_ENABLE", "1")])
def test_a_harmful_value_is_named_with_what_it_costs(name: str, value: str) -> None:
    found = of(name, {name: value})
    assert (found.severity, found.seen) == (Severity.WARNING, f"{name}={value}: {SETTINGS[name].otherwise}")
    assert (found.source, found.todo) == ("this environment", f"unset {name}")
    assert of(name, {name: SETTINGS[name].value}).severity is Severity.OK


def test_a_folder_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    fine = node._folder(tmp_path, 1, "here", "free it")
    assert (fine.severity, fine.source, fine.todo) == (Severity.OK, "here", "")
    full = node._folder(tmp_path, 10**18, "here", "free it")
    assert (full.severity, full.todo) == (Severity.WARNING, "free it")
    assert " of it free" in full.seen
    missing = node._folder(tmp_path / "not", 1, "here", "free it")
    gone = f"{tmp_path / 'not'} cannot be written: No such file or directory"
    assert (missing.severity, missing.seen) == (Severity.ERROR, gone)
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
        raise RuntimeError("no\nmetadata")

    monkeypatch.setattr(node, "_versions", fails)
    said: list[str] = []
    found = node.examine(ranks=1, run_dir=None, cpu=True, preload=(), script=None, progress=said.append)
    (failed,) = [each for each in found if each.seen == "the check failed: RuntimeError: no metadata"]
    assert (failed.severity, bool(failed.todo)) == (Severity.WARNING, True)
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


def test_a_check_that_does_not_end_is_a_finding() -> None:
    forever = threading.Event()
    try:
        (found,) = _checked(Family.STORAGE, lambda: [OK] * forever.wait(60.0), 0.05)
    finally:
        forever.set()
    assert found.seen == "the check did not end within 0.05 s"
    assert _checked(Family.VERSIONS, lambda: [OK], 10.0) == [OK]


Wrong = Callable[..., list[tuple[Severity, str]]]
PACKAGES = {
    **{"torch": "2.7.1+cu128", "lightning": "2.5", "rich": "14.0.0"},
    **{"nemo_toolkit": "2.7.3", "megatron-core": "0.15.3"},
}
NEEDED = {
    **{"torch": ">=2.6", "lightning": ">=2.4", "nemo_toolkit": "<2.8,>=2.7"},
    **{"megatron-core": "<0.16,>=0.15", "Python": ">=3.10"},
}
WITHOUT_NEMO = {name: PACKAGES[name] for name in ("torch", "lightning", "rich")}
TESTED = "tested: 0.3 with 0.16 and 0.6 with 0.19"
OLD = "The NVIDIA driver on your system is too old"


def bridge(own: str, core: str) -> dict[str, Any]:
    return {"packages": {**WITHOUT_NEMO, "megatron-bridge": own, "megatron-core": core}}


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Wrong:
    """Return what is said of a machine with a GPU that has, or lacks, the given versions."""

    def on(*, cpu: bool = False, **other: Any) -> list[tuple[Severity, str]]:
        seen = {"python": "3.11.7", "packages": PACKAGES, "torch": _Torch((2, 26, 2), has_gpu=True), **other}
        monkeypatch.setattr(platform, "python_version", lambda: seen["python"])
        for name, value in {"_needed": NEEDED, "_torch": seen["torch"], "_has_driver": True}.items():
            monkeypatch.setattr(node, name, partial(copy, value))
        monkeypatch.setattr(node, "installed", lambda _: seen["packages"])
        return [(each.severity, each.seen) for each in _versions(cpu) if each.severity is not Severity.OK]

    return on


def test_what_is_recent_enough_is_right(wrong: Wrong) -> None:
    assert wrong() == []
    assert wrong(packages={**PACKAGES, "lightning": "2.5.3", "rich": "15.0.0"}) == []
    assert wrong(cpu=True, torch=_Torch()) == []
    for versions in (("0.3.1", "0.16.1"), ("0.6.2", "0.19.2")):
        assert wrong(**bridge(*versions)) == []


@pytest.mark.parametrize(
    ("seen", "severity", "words"),
    [
        (dict(python="3.9.2"), Severity.ERROR, "Python 3.9.2; checkpointless needs >=3.10"),
        (dict(packages={**PACKAGES, "torch": "2.5.1"}), Severity.ERROR, "torch 2.5.1"),
        (
            dict(packages={**PACKAGES, "megatron-core": "0.16.0"}),
            Severity.WARNING,
            "nemo_toolkit 2.7.3 with megatron-core 0.16.0; tested: 2.7 with 0.15",
        ),
        (bridge("0.6.2", "0.16.1"), Severity.WARNING, f"megatron-bridge 0.6.2 with megatron-core 0.16.1; {TESTED}"),
        (bridge("0.7.0", "0.20.0"), Severity.WARNING, f"megatron-bridge 0.7.0 with megatron-core 0.20.0; {TESTED}"),
        (dict(packages={"torch": "2.7", "rich": "15"}), Severity.ERROR, "lightning is not installed"),
        (dict(torch=_Torch((2, 21, 5), True)), Severity.WARNING, "NCCL 2.21.5: aborting"),
        (dict(torch=_Torch()), Severity.WARNING, "over gloo, though there is a GPU"),
        (dict(torch=_Torch(error="torch cannot be imported: x")), Severity.ERROR, "cannot be imported"),
        (dict(torch=_Torch((2, 26, 2), warning=OLD)), Severity.ERROR, f"torch can use no GPU: {OLD}"),
    ],
)
def test_what_is_wrong_is_said(wrong: Wrong, seen: dict[str, Any], severity: Severity, words: str) -> None:
    ((found, said),) = wrong(**seen)
    assert found is severity
    assert words in said


@pytest.mark.slow
def test_the_versions_of_this_machine_are_read() -> None:
    found = [each for each in _versions(cpu=True) if each.severity is not Severity.ERROR]
    assert found[0].seen == f"Python {platform.python_version()}"
    assert found[1].seen.startswith("torch 2.")
    assert found[-1].source == node._TORCH
    assert _needed().items() >= {"torch": ">=2.6", "Python": ">=3.10"}.items()
    assert _needed()["rich"] == ">=13"  # what an extra asks in addition is not for everybody


def test_torch_is_asked_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(node, "TORCH_TIMEOUT_S", 0.2)
    assert _torch() == _Torch(error="torch was not imported within 0.2 s")
