"""Test the command `doctor`: the page, the JSON, the exit status, and what a job says before it begins."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointless.cli import main
from checkpointless.doctor import node
from checkpointless.doctor.node import _Torch
from checkpointless.launcher.agent import launch as launch_module
from checkpointless.system.nccl import SETTINGS


@pytest.fixture(autouse=True)
def _healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Be on a machine without a GPU, and do not import torch."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(node, "_has_driver", lambda: False)
    monkeypatch.setattr(node, "_torch", _Torch)
    monkeypatch.setattr(node, "SHARED_MEMORY", tmp_path)  # other work on this machine may have filled it


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def show(status: int, *argv: str) -> str:
        assert main(["doctor", *argv]) == status
        return capsys.readouterr().out

    return show


def test_a_healthy_machine_has_nothing_to_change(shown: Callable[..., str]) -> None:
    text = shown(0)
    assert "nothing has to be changed" in text
    assert "what to change" not in text
    for words in ("ranks meet over gloo", "open files", "NCCL_NVLS_ENABLE=0", "Python 3", "the default that"):
        assert words in text


def test_what_is_wrong_comes_first_with_what_to_do(
    shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(node, "_torch", lambda: _Torch(error="torch cannot be imported: no libcudart"))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    text = shown(1, "--run-dir", str(tmp_path / "new"))
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert rows[0].startswith("│ error")
    assert "no libcudart" in rows[0]
    for words in ("NCCL_NVLS_ENABLE=1", "unset NCCL_NVLS_ENABLE", "1 error, "):
        assert words in text
    assert not (tmp_path / "new").exists()


def test_json_goes_to_standard_output_alone_or_to_a_file(
    shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    document = json.loads(shown(1, "--json", "-"))
    assert document["worst"] == "warning"
    assert document["findings"][0]["seen"].startswith("TORCH_DISTRIBUTED_DEBUG=DETAIL: ")
    path = tmp_path / "doctor.json"
    assert "DETAIL" in shown(1, "--json", str(path))
    assert json.loads(path.read_text())["worst"] == "warning"


def test_a_job_says_the_two_worst_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_module, "launch", lambda config, say: 0)

    def said(*words: str) -> list[str]:
        assert main(["run", *words, "train.py"]) == 0
        lines = capsys.readouterr().err.splitlines()
        return [line for line in lines if line.endswith("(all findings: checkpointless doctor)")]

    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert said() == [], "there is no GPU"
    monkeypatch.setattr(node, "_has_driver", lambda: True)
    assert ["NCCL_NVLS" in line for line in said()] == [True]
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setenv("TMPDIR", "/nowhere")
    told = said()
    assert [line.split(": ")[1] for line in told] == ["warning", "warning"]
    assert ["DETAIL" in line or "NCCL_NVLS" in line for line in told] == [True, True]
    assert ["/nowhere cannot be written" in line for line in said("--cpu")] == [True]
