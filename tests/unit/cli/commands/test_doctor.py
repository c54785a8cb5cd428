"""Test the command `doctor`: the page, the JSON, the exit status, and what a job says before it begins."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from checkpointless.agent import launch as launch_module
from checkpointless.cli import main
from checkpointless.doctor import devices, storage, versions
from checkpointless.doctor.devices import Devices
from checkpointless.doctor.findings import Family, Finding, Severity
from checkpointless.doctor.records import write
from checkpointless.doctor.versions import Torch
from checkpointless.nccl import SETTINGS
from tests.unit.doctor.test_job import FULL, record


@pytest.fixture(autouse=True)
def _healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be on a machine without a GPU, and do not import torch."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "has_driver", lambda: False)
    monkeypatch.setattr(versions, "_torch", lambda: Torch("2.13.0"))


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
    for words in ("no NVIDIA driver", "/dev/shm", "NCCL_NVLS_ENABLE=0", "Python 3", "the default that"):
        assert words in text


def test_what_is_wrong_comes_first_with_what_to_do(
    shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lost = Finding(Family.DEVICES, Severity.ERROR, "GPU 3 is lost")
    monkeypatch.setattr(devices, "read", lambda: Devices("12.8", (lost,)))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    text = shown(1, "--run-dir", str(tmp_path / "new"))
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert rows[0].startswith("│ error")
    assert "GPU 3" in rows[0]
    for words in ("NCCL_NVLS_ENABLE=1", "unset NCCL_NVLS_ENABLE", "1 error, "):
        assert words in text
    assert not (tmp_path / "new").exists()


def test_json_goes_to_standard_output_alone_or_to_a_file(
    shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    document = json.loads(shown(1, "--json", "-"))
    assert (document["worst"], document["looked_at"]) == ("warning", "this machine")
    assert document["findings"][0]["seen"].startswith("TORCH_DISTRIBUTED_DEBUG=DETAIL: ")
    path = tmp_path / "doctor.json"
    assert "DETAIL" in shown(1, "--json", str(path))
    assert json.loads(path.read_text())["worst"] == "warning"


def test_all_nodes_of_a_run_are_shown(shown: Callable[..., str], tmp_path: Path) -> None:
    write(record(0, torch="2.7"), tmp_path)
    write(record(1, FULL, torch="2.8"), tmp_path)
    text = shown(1, "--run-dir", str(tmp_path))
    for words in ("the disk is full (node 1)", "torch differs: 2.7 on node 0; 2.8 on node 1", "2 nodes left"):
        assert words in text


def test_a_text_of_a_node_does_nothing_to_a_terminal(shown: Callable[..., str], tmp_path: Path) -> None:
    write(record(0, replace(FULL, seen="a\x1b[2Jb"), nodes=1), tmp_path)
    assert "\x1b" not in shown(1, "--run-dir", str(tmp_path))


def test_a_run_without_findings_is_a_warning(shown: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    (found,) = json.loads(shown(1, "--run-dir", str(tmp_path), "--json", "-"))["findings"]
    assert (found["severity"], found["seen"]) == ("warning", "no node has left its findings (yet)")


def test_memory_is_judged_without_a_model(shown: Callable[..., str]) -> None:
    asked = ["--parameters", "8e9", "--shards", "8"]
    assert "76 GB at the peak of a re-entry" in shown(0, *asked, "--device-memory", "140e9")
    assert "ranks run out of memory in a recovery" in " ".join(
        shown(1, *asked, "--device-memory", "70e9", "--json", "-").split()
    )


@pytest.mark.nemo
def test_a_recipe_says_its_ranks(shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_args: object, **_more: object) -> None:
        raise RuntimeError("no imports here")

    monkeypatch.setattr("checkpointless.doctor.forking.read", refused)
    monkeypatch.setattr("checkpointless.recipes.counting.counted", lambda *args: "it is not built here")
    document = json.loads(shown(1, "--recipe", "tiny_gpt_cpu", "trainer.max_steps=3", "--json", "-"))
    seen = [each["seen"] for each in document["findings"]]
    assert "the number of parameters is not known: it is not built here" in seen
    assert any("no imports here" in each for each in seen)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["trainer.max_steps=3"], "--recipe"),
        (["-m"], "add --script"),
        (["--shards", "8"], "add --parameters"),
        (["--parameters", "many"], "such as 8e9"),
        (["--script", "nowhere.py"], "nowhere.py"),
        (["--rdzv-endpoint", "node0:x"], "HOST[:PORT]"),
        (["--json", "/no/such/folder/x"], "cannot write /no/such/folder/x"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["doctor", *argv])
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else -1
    said = capsys.readouterr().err.splitlines()[-1]
    assert status == 2
    assert said.startswith("checkpointless: error: ")
    assert says in said


def test_a_job_says_the_two_worst_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_module, "launch", lambda config, say: 0)
    monkeypatch.setattr(versions, "has_driver", lambda: True)
    monkeypatch.setattr(storage, "shared_memory", list)  # other work on this machine may have filled it
    assert main(["run", "train.py"]) == 0
    assert "doctor" not in capsys.readouterr().err
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert main(["run", "train.py"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "(all: checkpointless doctor)" in line]
    assert [line.split(": ")[1] for line in told] == ["warning", "warning"]
    assert ["DETAIL" in line or "NCCL_NVLS" in line for line in told] == [True, True]
    assert main(["run", "--cpu", "train.py"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "(all: checkpointless doctor)" in line]
    assert ["/nowhere cannot be written" in line for line in told] == [True]
