"""Test the tables that the GPU suite writes after each test."""

from __future__ import annotations

import json
from pathlib import Path

from tests.gpu.results import (
    JSON,
    MACHINE,
    TABLE,
    Figure,
    Outcome,
    Result,
    add,
    has_failed,
    read,
    report,
    summary,
)

PASSED = Result("part1", "test_a", Outcome.PASSED, 1.25, notes={"seconds": 2.000012, "whole": True})
FAILED = Result("part1", "test_b", Outcome.FAILED, 3.0, "def test():\nE   assert 1 | 2\n")
SKIPPED = Result("part3", "test_c", Outcome.SKIPPED, 0.0, "needs CUDA")
MEASURED = Result(
    "part4",
    "digest",
    Outcome.PASSED,
    9.0,
    figures=(Figure("digest", "GB/s", (1.0, 3.0, 2.0), "copy", (8.0, 8.0)), Figure("depth", "launches", (1024.0,))),
)


def test_each_result_is_there_before_the_next_test_begins(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    for count, result in enumerate((PASSED, FAILED, SKIPPED, MEASURED), 1):
        add(folder, result)
        assert len(json.loads((folder / JSON).read_text())["results"]) == count
    assert read(folder) == [PASSED, FAILED, SKIPPED, MEASURED]
    (folder / MACHINE).write_text('{"GPU": "none"}')
    add(folder, MEASURED)
    assert "| GPU | none |" in (folder / TABLE).read_text()


def test_of_two_results_of_one_test_the_later_counts(tmp_path: Path) -> None:
    add(tmp_path, Result("part1", "test_a", Outcome.PASSED, 1.0))
    add(tmp_path, Result("part1", "test_a", Outcome.FAILED, 1.0, "its teardown failed"))
    assert [each.outcome for each in read(tmp_path)] == [Outcome.FAILED]


def test_the_report_says_what_was_seen() -> None:
    text = report({"GPU": "H100", "NCCL": "2.28.9"}, [PASSED, FAILED, SKIPPED, MEASURED])
    assert "| NCCL | 2.28.9 |" in text
    assert "| part1 | test_a | passed | 1.2 | seconds: 2, whole: True |" in text
    assert "| part1 | test_b | failed | 3.0 | assert 1 \\| 2 |" in text
    assert "| part3 | test_c | skipped | 0.0 | needs CUDA |" in text
    assert "| digest | GB/s | 3 | 2 | 1 to 3 | 0.25 | copy |" in text
    assert "| depth | launches | 1 | 1024 | 1024 to 1024 |  |  |" in text
    assert "## part1: test_b\n\n```text\ndef test():" in text


def test_the_summary_counts_outcomes() -> None:
    assert summary([PASSED, FAILED, SKIPPED, MEASURED]) == "2 passed, 1 failed, 1 skipped"
    assert summary([]) == "nothing ran"
    assert has_failed([PASSED, FAILED])
    assert has_failed([Result("part2", "(the whole part)", Outcome.CUT, 0.0)])
    assert not has_failed([PASSED, SKIPPED])
