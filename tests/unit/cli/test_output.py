"""Test what the command line prints itself."""

import pytest

from checkpointless.cli.command import out, say
from checkpointless.cli.command_line import _report_error


def test_a_line_about_a_job_names_the_program_and_shows_what_cannot_be_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say("two ranks\tof \x1b[2Jtrain\nin runs/1")
    assert capsys.readouterr() == ("", "checkpointless: two ranks\tof \\x1b[2Jtrain\n  in runs/1\n")


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    _report_error("cannot\n  listen")
    assert capsys.readouterr() == ("", "checkpointless: error: cannot listen\n")


def test_a_result_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    out("equal")
    assert capsys.readouterr() == ("equal\n", "")
