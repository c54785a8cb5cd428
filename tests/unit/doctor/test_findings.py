"""Test how findings are put in order, written and shown, and what becomes of a check that fails."""

from __future__ import annotations

import threading

from checkpointless.doctor.findings import (
    Family,
    Finding,
    Severity,
    worst_first,
)
from checkpointless.doctor.node import _checked

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
