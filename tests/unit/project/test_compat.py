"""Test what ``make compat`` makes of the words of pip and pytest."""

from __future__ import annotations

import sys

from tests.compat import Outcome, interpreter, summary, table, why_not_installed

CONFLICT = """\
Collecting lightning>2.4
ERROR: Cannot install checkpointless[nemo]==0.1.0, lightning>2.4 because these package versions conflict.

The conflict is caused by:
    The user requested lightning>2.4
    checkpointless[nemo] 0.1.0 depends on lightning>=2.4
    nemo-toolkit[lightning] 2.7.3 depends on lightning<=2.4.0 and >2.2.1; extra == "lightning"

ERROR: ResolutionImpossible: for help visit https://pip.pypa.io
"""


def test_a_conflict_is_said_by_the_package_that_is_in_the_way() -> None:
    assert why_not_installed(CONFLICT) == (
        "not installable: nemo-toolkit[lightning] 2.7.3 depends on lightning<=2.4.0 and >2.2.1"
    )


def test_any_other_error_of_pip_is_one_line() -> None:
    said = "ERROR: No matching distribution found for torch==2.13.0\nERROR: more\n"
    assert why_not_installed(said) == "not installable: No matching distribution found for torch==2.13.0"
    assert why_not_installed("") == "not installable: pip says nothing"
    assert len(why_not_installed("ERROR: " + "x" * 1000)) == 160


def test_the_result_is_pytests_last_line() -> None:
    assert summary("....\n=== 7 failed, 3871 passed, 10 skipped in 297.15s (0:04:57) ===\n") == (
        "7 failed, 3871 passed, 10 skipped in 297.15s (0:04:57)"
    )
    assert summary("5 skipped, 47 deselected, 1 error in 5.74s") == "5 skipped, 47 deselected, 1 error in 5.74s"
    assert summary("Killed") == "pytest said no result"


def test_the_table_is_markdown() -> None:
    lines = table([Outcome("Python 3.10", "", "no Python 3.10 on this machine")]).splitlines()
    assert lines[0] == "| environment | installed | result |"
    assert lines[2] == "| Python 3.10 |  | no Python 3.10 on this machine |"
    assert {line.count("|") for line in lines} == {4}


def test_an_interpreter_that_is_not_there_is_none() -> None:
    assert interpreter("2.1") is None
    here = ".".join(map(str, sys.version_info[:2]))
    found = interpreter(here)
    assert found is None or found.is_file()
