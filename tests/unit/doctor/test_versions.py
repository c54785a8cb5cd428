"""Test what versions mean for a recovery."""

from __future__ import annotations

import platform
from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from checkpointless.doctor import node
from checkpointless.doctor.findings import Severity
from checkpointless.doctor.node import _needed, _Torch, _torch, _versions

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
    for bridge, core in (("0.3.1", "0.16.1"), ("0.6.2", "0.19.2")):
        packages = {**WITHOUT_NEMO, "megatron-bridge": bridge, "megatron-core": core}
        assert wrong(packages=packages) == []


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
        (
            dict(packages={**WITHOUT_NEMO, "megatron-bridge": "0.6.2", "megatron-core": "0.16.1"}),
            Severity.WARNING,
            "megatron-bridge 0.6.2 with megatron-core 0.16.1; tested: 0.3 with 0.16 and 0.6 with 0.19",
        ),
        (
            dict(packages={**WITHOUT_NEMO, "megatron-bridge": "0.7.0", "megatron-core": "0.20.0"}),
            Severity.WARNING,
            "megatron-bridge 0.7.0 with megatron-core 0.20.0; tested: 0.3 with 0.16 and 0.6 with 0.19",
        ),
        (dict(packages={"torch": "2.7", "rich": "15"}), Severity.ERROR, "lightning is not installed"),
        (dict(torch=_Torch((2, 21, 5), True)), Severity.WARNING, "NCCL 2.21.5: aborting"),
        (dict(torch=_Torch()), Severity.WARNING, "over gloo, though there is a GPU"),
        (dict(torch=_Torch(error="torch cannot be imported: x")), Severity.ERROR, "cannot be imported"),
        (
            dict(torch=_Torch((2, 26, 2), warning="The NVIDIA driver on your system is too old")),
            Severity.ERROR,
            "torch can use no GPU: The NVIDIA driver on your system is too old",
        ),
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
