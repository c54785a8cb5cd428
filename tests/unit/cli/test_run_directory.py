"""Test the directory of a run: a new one is empty or shared, and its name is taken by nobody."""

import re
from pathlib import Path

import pytest

from checkpointless.cli import run_directory
from checkpointless.cli.run_directory import check_can_be_made, check_run_dir, new_run_dir
from checkpointless.cli.values import UsageError


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_new_directory_is_named_after_the_time_and_the_run() -> None:
    assert re.fullmatch(r"runs/\d{8}T\d{6}Z-train", str(new_run_dir(None, "train")))
    assert not run_directory.RUNS_DIR.exists()


def test_two_runs_of_one_second_have_two_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen(run_directory.datetime):  # type: ignore[misc, name-defined]
        @classmethod
        def now(cls, tz: object = None) -> "Frozen":
            return cls(2026, 1, 1, 12, 0, 0)

    monkeypatch.setattr(run_directory, "datetime", Frozen)
    first = new_run_dir(None, "train")
    first.mkdir(parents=True)
    assert first == Path("runs/20260101T120000Z-train")
    assert re.fullmatch(r"runs/20260101T120000Z-train-\d+", str(new_run_dir(None, "train")))


def test_a_directory_with_a_run_in_it_is_taken_only_if_it_is_shared() -> None:
    run_dir = Path("run")
    assert new_run_dir(run_dir, "train") == run_dir
    run_dir.mkdir()
    (run_dir / "events.jsonl").write_text("{}\n")
    assert new_run_dir(run_dir, "train", shared=True) == run_dir
    with pytest.raises(UsageError, match="not empty"):
        new_run_dir(run_dir, "train")
    with pytest.raises(UsageError, match="is a file"):
        new_run_dir(run_dir / "events.jsonl", "train", shared=True)


def test_what_cannot_be_made_is_known_before() -> None:
    check_can_be_made(None)
    check_can_be_made(Path("not/there/yet"))
    Path("file").write_text("")
    with pytest.raises(UsageError, match="file is a file"):
        check_can_be_made(Path("file/below"))


def test_a_run_directory_to_read_has_to_exist() -> None:
    check_run_dir(Path())
    with pytest.raises(UsageError, match="there is no run directory nowhere"):
        check_run_dir(Path("nowhere"))
