"""Test the rule that names slow ranks, with steps that are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import pytest

from checkpointless.launcher.agent.node import _pace_of
from checkpointless.launcher.coordinator.stragglers import _median_without, _Rule, _Straggler
from checkpointless.launcher.protocol.board import Board, PaceReading
from checkpointless.launcher.protocol.messages import Paces, RankPace
from tests.unit.messaged_job import Job

STEPS, ONSET = 120, 60
Step = Callable[[int, int], tuple[float, float]]  # by rank and step: what it takes, and how much of it is data


class Played:
    """A job whose boards are looked at every third step."""

    def __init__(self, roles: list[int], step: Step) -> None:
        self.rule = _Rule()
        self.found: list[tuple[int, _Straggler]] = []  # with the step
        self.over: list[int] = []
        newest: dict[int, list[tuple[float, float]]] = {rank: [] for rank in range(len(roles))}
        for number in range(STEPS):
            for rank, steps in newest.items():
                steps.append(step(rank, number))
            if number % 3:
                continue
            readings = {rank: steps[-Board.PACES :] for rank, steps in newest.items()}
            found, over = self.rule.look(
                {
                    rank: _pace_of(rank, PaceReading(roles[rank], number + 1, *map(tuple, zip(*steps))))
                    for rank, steps in readings.items()
                }
            )
            self.found += [(number, each) for each in found]
            self.over += over


def uneven(seed: int, least: int = 1) -> tuple[list[int], Step]:
    """Return a healthy job: stages, experts with other loads, noise, hiccups, growing sequences, rank 0's saves."""
    draw = random.Random(seed)
    stages, replicas = draw.choice([(1, 4), (2, 2), (4, least), (4, 2), (3, 4), (1, 2)])
    of_stage = [draw.uniform(0.02, 0.2) for _ in range(stages)]
    noise, load = draw.uniform(0.01, 0.15), draw.uniform(0.0, 0.2)
    grows, hiccups, saves = draw.choice([0.0, 1.0]), draw.uniform(0.0, 0.1), draw.choice([10, 40])
    roles = [rank // replicas for rank in range(stages * replicas)]

    def step(rank: int, number: int) -> tuple[float, float]:
        own_s = of_stage[roles[rank]] * (1 + grows * number / STEPS) * draw.lognormvariate(0, noise)
        own_s *= 1 + draw.uniform(0, load)  # what experts get changes from step to step
        own_s += 0.3 * (draw.random() < hiccups) + 0.5 * (rank == 0 and number % saves == 0)
        data_s = 0.002 * draw.lognormvariate(0, 0.5)
        return own_s + data_s, data_s

    return roles, step


@pytest.mark.parametrize("seed", range(20))
def test_an_uneven_job_that_is_healthy_accuses_nobody(seed: int) -> None:
    assert Played(*uneven(seed)).found == []


@pytest.mark.parametrize("seed", range(20))
def test_a_throttled_rank_is_found_within_twenty_steps(seed: int) -> None:
    roles, healthy = uneven(seed, least=2)  # a rank without peers is compared with nobody
    culprit = random.Random(seed).randrange(len(roles))
    is_data = seed % 2 == 1

    def step(rank: int, number: int) -> tuple[float, float]:
        own_s, data_s = healthy(rank, number)
        if rank != culprit or number < ONSET:
            return own_s, data_s
        more_s = 2.0 * own_s + 0.02
        return own_s + more_s, data_s + more_s * is_data

    ((number, found),) = Played(roles, step).found
    assert (found.rank, found.is_data) == (culprit, is_data)
    assert ONSET <= number <= ONSET + 20
    assert f"rank {culprit} on node 3 is slow" in found.line(3)


def test_an_episode_ends_and_another_one_is_told_again() -> None:
    def step(rank: int, number: int) -> tuple[float, float]:
        return (0.1 if rank == 1 and (20 <= number < 50 or number >= 80) else 0.03), 0.0

    played = Played([0, 0, 0], step)
    assert [each.rank for _, each in played.found] == [1, 1]
    assert played.over == [1]
    assert played.rule.forget() == [1]
    assert played.rule.forget() == []


def test_steps_that_are_too_short_to_matter_and_a_lone_rank_accuse_nobody() -> None:
    assert Played([0, 0], lambda rank, number: (0.0015 if rank else 0.0001, 0.0)).found == []
    assert Played([0], lambda rank, number: (0.1 if number > ONSET else 0.01, 0.0)).found == []


@pytest.mark.parametrize("step_s", [0.01, 30.0])
def test_a_slow_rank_is_confirmed_when_looks_are_five_seconds_apart(step_s: float) -> None:
    rule, draw, every_s = _Rule(), random.Random(1), 5.0
    onset, last = max(60, int(20 * every_s / step_s)), max(100, int(30 * every_s / step_s))
    found_at: list[int] = []
    for look in range(int(last * step_s / every_s)):
        steps = int(look * every_s / step_s)
        if not steps:
            continue
        paces = {}
        for rank in range(4):
            of_ring = range(max(0, steps - Board.PACES), steps)
            own = tuple(step_s * (3 if rank == 2 and step >= onset else draw.uniform(1, 1.1)) for step in of_ring)
            paces[rank] = _pace_of(rank, PaceReading(0, steps, own, tuple(0.0 for _ in own)))
        found, _ = rule.look(paces)
        assert {each.rank for each in found} <= {2}
        found_at += [steps] * len(found)
    (steps,) = found_at
    assert onset < steps <= onset + max(20, 3 * every_s / step_s)


@pytest.mark.parametrize("values", [[1, 2], [3, 3, 1], [5, 1, 4, 2], [7, 7, 7, 7, 2], [*range(9), 4]])
def test_the_median_of_all_but_one(values: list[float]) -> None:
    for at, value in enumerate(values):
        assert _median_without(sorted(values), value) == median(values[:at] + values[at + 1 :])


@pytest.mark.parametrize("spares", [0, 1])
def test_a_node_of_slow_ranks_is_left_once_if_a_spare_is_free(monkeypatch: pytest.MonkeyPatch, spares: int) -> None:
    found = [[_Straggler(rank, 9e5, 1e5, 0.0, False) for rank in (2, 3)]]
    monkeypatch.setattr(_Rule, "look", lambda rule, paces: (found.pop() if found else [], []))
    job = Job(move_stragglers=True).begin()
    for _ in range(spares):
        job.join(-1)
    for number in range(3):
        job.tell(2, Paces(0, [RankPace(2, 0, number, 100, 1, 1)]))
        job.coordinator.tick(job.now_s() + number)
    begins = "node 1 moves to a spare (rank 3 is slow): its successors start while training goes on"
    refused = "node 1 is not moved: no spare is free: start one more agent with --spares, and ask again"
    said = begins if spares else f"{refused}; training goes on"
    assert [line for line in job.said if line.startswith("node 1")] == [said]
