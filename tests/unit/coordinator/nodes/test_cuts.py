"""Test a job whose connections are cut at random, while processes and machines are lost."""

from __future__ import annotations

import pytest

from tests.unit.coordinator.nodes.cut_job import CutJob

JOBS_PER_CASE = 100
CASES_PER_COMMIT = 3


@pytest.mark.parametrize(
    "first_seed",
    [
        pytest.param(case * JOBS_PER_CASE, marks=pytest.mark.long if case >= CASES_PER_COMMIT else ())
        for case in range(16)
    ],
)
def test_whatever_is_cut_the_job_goes_on_with_every_process_that_lives(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + JOBS_PER_CASE):
        job = CutJob(seed, nnodes=2 + seed % 3)
        for _ in range(job.random.randint(30, 400)):
            job.happen()
            assert job.coordinator.job.outcome is None, (seed, job.story[-60:])
        job.train()
        job.finish()
        assert sum(agent.healthy_ended for agent in job.agents) == 0, seed
