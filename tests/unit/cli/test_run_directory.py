"""Test the directory of a run: a new one is empty or shared, and two runs that begin at once do not mix."""

import threading
from pathlib import Path

import pytest

from checkpointless.cli import command
from checkpointless.cli.command import UsageError, new_run_dir


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen(command.datetime):  # type: ignore[misc, name-defined]
        @classmethod
        def now(cls, tz: object = None) -> "Frozen":
            return cls(2026, 1, 1, 12, 0, 0)

    monkeypatch.setattr(command, "datetime", Frozen)


def at_once(asked: Path | None, count: int = 8) -> list[Path | str]:
    """Return what each of several jobs gets that are started at once: a directory, or why not."""
    gate = threading.Barrier(count)
    found: list[Path | str] = []

    def start() -> None:
        gate.wait(60)
        try:
            found.append(new_run_dir(asked, "train"))
        except UsageError as error:
            found.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.usefixtures("_at_one_time")
def test_two_runs_of_one_second_have_two_directories() -> None:
    assert new_run_dir(None, "train") == Path("runs/20260101T120000Z-train")
    assert new_run_dir(None, "train") == Path("runs/20260101T120000Z-train-2")


@pytest.mark.parametrize("is_there", [False, True])
def test_of_several_runs_that_ask_for_one_directory_at_once_one_gets_it(is_there: bool) -> None:
    for attempt in range(20):
        run_dir = Path(f"run-{attempt}")
        if is_there:
            run_dir.mkdir()
        found = at_once(run_dir)
        assert found.count(run_dir) == 1
        assert found.count(f"run directory {run_dir} is not empty: name a new one") == 7


def test_a_directory_with_a_run_in_it_is_taken_only_if_it_is_shared() -> None:
    run_dir = Path("run")
    assert new_run_dir(run_dir, "train") == run_dir
    assert new_run_dir(run_dir, "train", shared=True) == run_dir
    with pytest.raises(UsageError, match="not empty"):
        new_run_dir(run_dir, "train")
    with pytest.raises(UsageError, match="is a file"):
        new_run_dir(run_dir / "events.jsonl", "train", shared=True)
