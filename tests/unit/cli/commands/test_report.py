"""Test the command `report`: what the terminal shows, and what is written where."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from checkpointless.cli import main
from checkpointless.observability.telemetry.events import EVENTS_FILE
from checkpointless.observability.telemetry.scribe import traceback_path
from tests.unit.made_up_run import MadeUpRun, S
from tests.unit.report.reports import HOSTILE, simple_run


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def show(*argv: str) -> str:
        assert main(["report", *argv]) == 0
        return capsys.readouterr().out

    return show


def test_the_terminal_shows_it_all(tmp_path: Path, shown: Callable[..., str]) -> None:
    run, _ = simple_run()
    text = shown(str(run.write(tmp_path)))
    for words in ("1 incident; ended well", "sigkill", "step 21", "rank 0: 1.5 MB", "ETTR"):
        assert words in text
    assert "finished steps lost: 0" in text
    (bar,) = [line for line in text.splitlines() if "!" in line and ">" in line and "notice" not in line]
    drawn = "".join(mark for mark in bar if mark in "!x=#<>")
    assert len(drawn) == 56
    assert [len(part) for part in re.findall(r"!+|x+|=+|#+|<+|>+", drawn)] == [6, 14, 4, 12, 12, 8]


def test_a_hostile_cause_does_nothing_to_a_terminal(tmp_path: Path, shown: Callable[..., str]) -> None:
    run = MadeUpRun()
    run.start()
    run.incident(20.0, "1", committed=3, cause=HOSTILE)
    run.end(40.0, code=1, reason=HOSTILE)
    text = shown(str(run.write(tmp_path)))
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "[red]" in text


def test_the_traceback_of_the_rank_that_failed_is_on_the_page(tmp_path: Path, shown: Callable[..., str]) -> None:
    run, _ = simple_run()
    for rank in (0, 1):
        path = traceback_path(tmp_path, 0, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"Traceback (most recent call last):\nValueError: of rank {rank}\n")
    text = shown(str(run.write(tmp_path)), "--html", str(tmp_path / "r.html"))
    assert f"tracebacks in full: {tmp_path / 'tracebacks'}" in text
    assert "ValueError: of rank 1" in (tmp_path / "r.html").read_text()
    assert "ValueError: of rank 0" not in (tmp_path / "r.html").read_text()


def test_empty_torn_and_unfinished_logs_are_shown_as_they_are(tmp_path: Path, shown: Callable[..., str]) -> None:
    (tmp_path / EVENTS_FILE).write_text("")
    page = tmp_path / "r.html"
    argv = [str(tmp_path), "--json", f"{page}.json", "--html", str(page), "--trace", f"{page}.trace"]
    for said in (shown(*argv), page.read_text()):
        assert "nothing recorded" in said
    run, _ = simple_run()
    run.events.pop()
    run.write(tmp_path)
    with (tmp_path / EVENTS_FILE).open("a") as log:
        log.write('{"not": "an event"}\n')
    assert "1 line of the log is torn or no event, and left out" in shown(*argv)
    with (tmp_path / EVENTS_FILE).open("a") as log:
        log.write('{"torn')
    text = shown(*argv)
    assert "2 lines of the log are torn" in text
    assert "no end in its log" in text


def test_runs_of_one_job_are_added_up_everywhere(tmp_path: Path, shown: Callable[..., str]) -> None:
    dirs = []
    for name, begins_s in (("2", 300), ("1", 0)):
        run = MadeUpRun()
        run.start()
        run.incident(31.0, "1", committed=21, how="hang")
        run.end(100.0, step=85)
        run.events = [replace(event, ts=event.ts + begins_s * S) for event in run.events]
        dirs.append(str(run.write(tmp_path / name)))
    page = tmp_path / "job.html"
    for text in (shown(*dirs, "--html", str(page)), page.read_text()):
        for words in ("2 runs of a job", "idle", "hang", "rank 1 on node 0", "goodput", "repeated"):
            assert words in text
        assert text.index(f"{dirs[1]}: 1 incident") < text.index(f"{dirs[0]}: 1 incident")
    document = json.loads(shown(*dirs, "--json", "-"))
    assert (document["format"], [each["run"]["path"] for each in document["runs"]]) == (2, dirs[::-1])
    found = document["goodput"]
    assert found["wall_s"] == pytest.approx(sum(found["seconds"].values())) == 400
    assert (found["seconds"]["idle"], found["goodput"]) == (200, found["seconds"]["training"] / 400)
    assert found["seconds"]["repeated"] > 60, "the second run makes all steps once more"
    assert found["lost"][0]["cause"] == "hang"


@pytest.mark.parametrize("argv", [["--trace", "t.json"], []])
def test_runs_that_are_no_job_are_refused_in_one_line(
    tmp_path: Path, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(simple_run()[0].write(tmp_path))
    assert main(["report", run_dir, run_dir, *argv]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "name one run directory" in line or "overlap" in line


@pytest.mark.parametrize("option", ["--json", "--html", "--trace"])
def test_an_unwritable_file_is_one_line(tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = simple_run()
    assert main(["report", str(run.write(tmp_path)), option, str(tmp_path / "no" / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
