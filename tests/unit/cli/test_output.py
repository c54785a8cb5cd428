"""Test what the command line prints itself."""

import pytest

from checkpointless.cli.command import say


def test_a_line_about_a_job_names_the_program_and_shows_what_cannot_be_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say("two ranks\tof \x1b[2Jtrain\nin runs/1")
    assert capsys.readouterr() == ("", "checkpointless: two ranks\tof \\x1b[2Jtrain\n  in runs/1\n")
