"""Test that what the vendor's client replies is checked."""

import pytest

from checkpointless.launcher.client.hyperpod.client import Start, _worker_envs

ENV = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1", "JOB_RESTART_COUNT": "0"}


@pytest.mark.parametrize(
    "reply",
    [
        None,
        ("job_fault", {"worker_envs": ENV}),
        ("job_start", None),
        ("job_start", {}),
        ("job_start", {"worker_envs": ENV | {"RANK": 0}}),
        ("job_start", {"worker_envs": ENV | {"RANK": "1"}}),
        ("job_start", {"worker_envs": ENV | {"RANK": "-1"}}),
        ("job_start", {"worker_envs": ENV | {"MASTER_PORT": "__import__('os')"}}),
        ("job_start", {"worker_envs": {name: value for name, value in ENV.items() if name != "JOB_RESTART_COUNT"}}),
    ],
)
def test_a_start_that_makes_no_sense_is_refused(reply: object) -> None:
    assert _worker_envs(("job_start", {"worker_envs": ENV}), "job_start") == ENV
    with pytest.raises(ValueError):
        _worker_envs(reply, "job_start")


def test_a_start_names_the_generation_and_the_place() -> None:
    env = ENV | {"RANK": "3", "WORLD_SIZE": "4", "JOB_RESTART_COUNT": "5"}
    start = Start.of(("job_start", {"worker_envs": env}))
    assert (start.generation, start.layout, start.env) == (5, (3, 4), env)
    with pytest.raises(ValueError, match="expected a 'job_start' message and got"):
        Start.of(("job_rank_info", {"worker_envs": env}))
