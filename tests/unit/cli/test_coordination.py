"""Test the options of what coordinates a job."""

import argparse

from checkpointless.cli.job import add_coordination_options, config_of
from checkpointless.launcher.coordinator.job_config import JobConfig


def config(*words: str) -> JobConfig:
    parser = argparse.ArgumentParser()
    add_coordination_options(parser)
    return config_of(JobConfig, parser.parse_args(words), nproc_per_node=1)


def test_only_what_was_given_is_set() -> None:
    assert config() == JobConfig(nproc_per_node=1)
    found = config("--max-incidents", "0", "--node-timeout", "2.5", "--http-port", "0", "--http-host", "::1")
    assert (found.max_incidents, found.node_timeout_s, found.http_port, found.http_host) == (0, 2.5, 0, "::1")
