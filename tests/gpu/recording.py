"""Have pytest write down each test of the suite as soon as it is over (``-p tests.gpu.recording``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.results import Outcome, Result, add

_FOLDER = "--gpu-results"
_PART = "--gpu-part"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options: where results go, and of which part of the suite they are."""
    parser.addoption(_FOLDER, metavar="DIR", default=None)
    parser.addoption(_PART, metavar="NAME", default="")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption(_FOLDER)
    if folder is not None:
        config.pluginmanager.register(Recorder(Path(folder), config.getoption(_PART)))


class Recorder:
    """Writes down what becomes of each test."""

    def __init__(self, folder: Path, part: str) -> None:
        self._folder, self._part = folder, part
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write down a test that is over: its call has ended, or it came to none."""
        name = report.nodeid.rpartition("/")[2]
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.when == "call" or report.outcome != "passed":
            outcome = Outcome(report.outcome)
            add(self._folder, Result(self._part, name, outcome, self._seconds[name], why(report), notes(report)))


def why(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return report.longreprtext


def notes(report: pytest.TestReport) -> dict[str, object]:
    """Return what the test recorded with pytest's ``record_property``."""
    return {name: value for name, value in report.user_properties}
