"""Test the options of what coordinates a job."""

import argparse

import pytest

from checkpointless.cli.command import UsageError
from checkpointless.cli.job import add_coordination_options, coordination_settings


def settings(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_coordination_options(parser)
    return coordination_settings(parser.parse_args(words))


def test_only_what_was_given_is_set() -> None:
    assert settings() == {}
    assert settings("--max-incidents", "0", "--node-timeout", "2.5") == {"max_incidents": 0, "node_timeout_s": 2.5}
    assert settings("--http-port", "0", "--http-host", "::1") == {"http_port": 0, "http_host": "::1"}


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(UsageError, match="--http-port"):
        settings("--http-host", "::1")
