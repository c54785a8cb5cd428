"""Provide nodes that come to a coordinator with ranks that run already."""

from __future__ import annotations

from typing import Any

from checkpointless.launcher.coordinator.job import Node
from checkpointless.launcher.protocol.messages import NodeMessage, RankStanding, RankState, Searching, Standing
from tests.unit.messaged_job import NPROC, Job


def standing(
    job: Job,
    index: int,
    *states: RankState,
    generation: int = 3,
    finished: bool = False,
    incarnation: int = 1,
    before: NodeMessage | None = None,
    run_id: str = "the run",
) -> Node:
    """Have a node say what its ranks were doing while there was no coordinator."""
    node = job.admit(index)
    if before is not None:
        job.hear(node, before)
    ranks = [
        RankStanding(index * NPROC + local, incarnation, state, 7 + local, 8 + local)
        for local, state in enumerate(states)
    ]
    job.hear(node, Standing(generation, 2, 6, run_id, finished, ranks))
    return node


def back(job: Job, index: int, *states: RankState, **more: Any) -> Node:
    """Bring a node back to the coordinator that began generation 0 of a job with it."""
    more = {"generation": 0, "incarnation": 0, "run_id": job.run_id, **more}
    return standing(job, index, *states, **more)


def goes_searching(job: Job) -> None:
    """Have node 1 lose sight of the coordinator, and say so."""
    node = job.coordinator.nodes[1]
    job.hear(node, Searching())
    job.lose(node, "it closed the connection")
