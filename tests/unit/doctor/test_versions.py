"""Test what versions mean for a recovery."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest

from checkpointless.doctor import node
from checkpointless.doctor.findings import Severity
from checkpointless.doctor.node import _judge_versions, _read_versions, _Torch, _Versions

WELL = _Versions(
    python="3.11.7",
    packages={
        **{"torch": "2.7.1+cu128", "lightning": "2.5", "rich": "14.0.0"},
        **{"nemo_toolkit": "2.7.3", "megatron-core": "0.15.3"},
    },
    needed={
        **{"torch": ">=2.6", "lightning": ">=2.4", "nemo_toolkit": "<2.8,>=2.7"},
        **{"megatron-core": "<0.16,>=0.15", "Python": ">=3.10"},
    },
    torch=_Torch((2, 26, 2), has_gpu=True),
    wants_gpu=True,
)
WITHOUT_NEMO = {name: WELL.packages[name] for name in ("torch", "lightning", "rich")}


def wrong(seen: _Versions) -> list[tuple[Severity, str]]:
    return [(each.severity, each.seen) for each in _judge_versions(seen) if each.severity is not Severity.OK]


def test_what_is_recent_enough_is_right() -> None:
    assert wrong(WELL) == []
    assert wrong(replace(WELL, packages={**WELL.packages, "lightning": "2.5.3", "rich": "15.0.0"})) == []
    assert wrong(replace(WELL, wants_gpu=False, torch=_Torch())) == []
    for bridge, core in (("0.3.1", "0.16.1"), ("0.6.2", "0.19.2")):
        packages = {**WITHOUT_NEMO, "megatron-bridge": bridge, "megatron-core": core}
        assert wrong(replace(WELL, packages=packages)) == []


@pytest.mark.parametrize(
    ("seen", "severity", "words"),
    [
        (replace(WELL, python="3.9.2"), Severity.ERROR, "Python 3.9.2; checkpointless needs >=3.10"),
        (replace(WELL, packages={**WELL.packages, "torch": "2.5.1"}), Severity.ERROR, "torch 2.5.1"),
        (
            replace(WELL, packages={**WELL.packages, "megatron-core": "0.16.0"}),
            Severity.WARNING,
            "nemo_toolkit 2.7.3 with megatron-core 0.16.0; tested: 2.7 with 0.15",
        ),
        (
            replace(WELL, packages={**WITHOUT_NEMO, "megatron-bridge": "0.6.2", "megatron-core": "0.16.1"}),
            Severity.WARNING,
            "megatron-bridge 0.6.2 with megatron-core 0.16.1; tested: 0.3 with 0.16 and 0.6 with 0.19",
        ),
        (
            replace(WELL, packages={**WITHOUT_NEMO, "megatron-bridge": "0.7.0", "megatron-core": "0.20.0"}),
            Severity.WARNING,
            "megatron-bridge 0.7.0 with megatron-core 0.20.0; tested: 0.3 with 0.16 and 0.6 with 0.19",
        ),
        (replace(WELL, packages={"torch": "2.7", "rich": "15"}), Severity.ERROR, "lightning is not installed"),
        (replace(WELL, torch=_Torch((2, 21, 5), True)), Severity.WARNING, "NCCL 2.21.5: aborting"),
        (replace(WELL, torch=_Torch()), Severity.WARNING, "over gloo, though there is a GPU"),
        (replace(WELL, torch=_Torch(error="torch cannot be imported: x")), Severity.ERROR, "cannot be imported"),
        (
            replace(WELL, torch=_Torch((2, 26, 2), warning="The NVIDIA driver on your system is too old")),
            Severity.ERROR,
            "torch can use no GPU: The NVIDIA driver on your system is too old",
        ),
    ],
)
def test_what_is_wrong_is_said(seen: _Versions, severity: Severity, words: str) -> None:
    ((found, said),) = wrong(seen)
    assert found is severity
    assert words in said


@pytest.mark.slow
def test_the_versions_of_this_machine_are_read() -> None:
    seen = _read_versions(cpu=True)
    assert seen.python == platform.python_version()
    assert seen.packages["torch"]
    assert seen.needed["torch"] == ">=2.6"
    assert seen.needed["rich"] == ">=13"  # what an extra asks in addition is not for everybody
    assert seen.needed["Python"] == ">=3.10"
    assert seen.torch is not None
    assert seen.torch.error == ""
    assert not seen.wants_gpu


def test_torch_is_asked_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(node, "TORCH_TIMEOUT_S", 0.2)
    assert _read_versions().torch == _Torch(error="torch was not imported within 0.2 s")
