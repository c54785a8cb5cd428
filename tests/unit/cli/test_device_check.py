"""Test the options of the device check, and their environment variables."""

from __future__ import annotations

import pytest

from checkpointless.cli import main
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.launcher.agent.ranks.process_keeper import DeviceCheck

COMMAND, LIMIT = "CHECKPOINTLESS_DEVICE_CHECK", "CHECKPOINTLESS_DEVICE_CHECK_TIMEOUT"


@pytest.mark.parametrize(
    ("variables", "words", "check"),
    [
        ({}, [], None),
        ({}, ["--device-check", "sh -c 'exit 1'"], DeviceCheck(("sh", "-c", "exit 1"), 30.0)),
        ({COMMAND: "true", LIMIT: "7"}, [], DeviceCheck(("true",), 7.0)),
        (
            {COMMAND: "false", LIMIT: "7"},
            ["--device-check", "true", "--device-check-timeout", "9"],
            DeviceCheck(("true",), 9.0),
        ),
        ({COMMAND: "true"}, ["--device-check", ""], None),
    ],
)
def test_an_option_wins_over_its_variable(
    launched: list[LaunchConfig],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    words: list[str],
    check: DeviceCheck | None,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["run", *words, "train.py"]) == 0
    assert launched[0].check == check


@pytest.mark.parametrize(
    ("variables", "words", "says"),
    [
        ({}, ["--device-check", "no-such-program"], "'no-such-program' cannot be run: there is no such program"),
        ({COMMAND: "sh -c 'x"}, [], "cannot be run: No closing quotation"),
        ({}, ["--device-check", "true", "--device-check-timeout", "0"], "above 0"),
        ({COMMAND: "true", LIMIT: "soon"}, [], "--device-check-timeout: 'soon' is not a number of seconds above 0"),
        (
            {},
            ["--device-check", "true", "--device-check-timeout", "120"],
            "120 s must be less than --regroup-timeout, 120 s",
        ),
    ],
)
def test_a_check_that_cannot_be_made_is_refused_in_one_line(
    launched: list[LaunchConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    words: list[str],
    says: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        status = main(["run", *words, "train.py"])
    except SystemExit as left:
        status = int(left.code or 0)
    error = capsys.readouterr().err
    assert (status, launched) == (2, [])
    assert error.startswith("checkpointless: error: ")
    assert error.count("\n") == 1
    assert says in error
