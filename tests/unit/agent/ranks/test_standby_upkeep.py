"""Test when standbys are made, and what is told of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointless.agent.ranks.standbys.pool import Fate, StandbyNews
from checkpointless.agent.ranks.standbys.upkeep import FIRST_PAUSE_S, SETTLE_S
from checkpointless.agent.ranks.starters import Started
from checkpointless.wire.node_messages import Begin, End, FaultNotice, Spawn
from checkpointless.wire.rank_state import RankState
from tests.unit.agent.commanded_node import CommandedNode


class TrainingNode(CommandedNode):
    """Represents an agent of ranks 0 and 1 that keeps standbys, and whose clock the test sets forward."""

    def __init__(self, folder: Path, warm_spares: int) -> None:
        self.later_s = 0.0
        super().__init__(folder, clock=lambda: time.monotonic() + self.later_s, warm_spares=warm_spares)
        self.tick()
        for rank in (0, 1):
            self.agent.obey(Spawn(rank, 0, 0, "", {}))
        self.tick()

    @property
    def kept(self) -> list[int]:
        return self.starter.kept

    def begin(self, generation: int, high_water: int = -1) -> None:
        """Have both ranks enter their block."""
        for rank in self.agent.ranks.values():
            rank.state = RankState.READY
        self.agent.obey(Begin(generation, "" if generation == 0 else "1", {}, high_water, -1))
        self.tick()

    def commit(self, step: int, *ranks: int) -> None:
        for rank in ranks:
            self.agent.ranks[rank].board.set_committed(step)
        self.tick()

    def lose(self, why: str = "it was killed by SIGKILL", fate: Fate = Fate.LOST) -> None:
        """Have a standby end."""
        self.starter.coming.append(StandbyNews(77, fate, why, 1.0))
        self.tick()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[TrainingNode]:
    made = TrainingNode(tmp_path, warm_spares=2)
    yield made
    made.agent.close()
    made.selector.close()


def test_standbys_are_made_once_every_rank_has_made_a_step(node: TrainingNode) -> None:
    assert node.kept == []
    node.begin(0)
    node.commit(1, 0)
    assert node.kept == []
    node.commit(1, 1)
    assert node.kept == [2]
    node.commit(2, 0, 1)
    assert node.kept == [2]


def test_what_a_recovery_used_is_made_again_after_its_first_step(node: TrainingNode) -> None:
    node.begin(0)
    node.commit(5, 0, 1)
    node.agent.obey(FaultNotice(0, "1", "rank 1 was killed", 1))
    node.ends(1)
    node.agent.obey(Spawn(1, 1, 1, "1", {}))
    node.tick()
    node.begin(1, high_water=5)
    assert node.kept == [2]
    node.commit(6, 0, 1)
    assert node.kept == [2, 2]


def test_ranks_that_make_no_steps_count_as_training_after_a_while(node: TrainingNode) -> None:
    node.begin(0)
    node.later_s = SETTLE_S
    node.tick()
    assert node.kept == [2]


def test_the_pauses_after_lost_standbys_grow_until_one_is_used(node: TrainingNode) -> None:
    node.begin(0)
    node.commit(1, 0, 1)
    for lost in range(3):
        node.lose()
        pause_s = FIRST_PAUSE_S * 2**lost
        node.later_s += pause_s - 1
        node.tick()
        assert len(node.kept) == lost + 1
        node.later_s += 1
        node.tick()
        assert len(node.kept) == lost + 2
    assert node.printed[0] == (
        "a standby is lost: it was killed by SIGKILL; until there is another, ranks are started without"
    )
    node.starter.coming.append(Started(1, 0, 1001, standby=True))
    node.lose()
    node.later_s += FIRST_PAUSE_S
    node.tick()
    assert len(node.kept) == 5


def test_one_that_an_import_spoils_is_made_again_at_once(node: TrainingNode) -> None:
    node.begin(0)
    node.commit(1, 0, 1)
    node.lose("bitsandbytes", Fate.SPOILED)
    assert node.kept == [2, 2]
    node.lose("bitsandbytes", Fate.SPOILED)
    assert node.printed == ["standbys do without bitsandbytes, which sets up CUDA when it is imported"]


def test_none_is_made_when_the_job_is_over(node: TrainingNode) -> None:
    node.begin(0)
    node.agent.obey(End(0, []))
    node.commit(1, 0, 1)
    node.lose()
    assert (node.kept, node.printed) == ([], [])


def test_none_is_made_unless_it_is_asked_for(tmp_path: Path) -> None:
    node = TrainingNode(tmp_path, warm_spares=0)
    node.begin(0)
    node.commit(1, 0, 1)
    node.later_s = SETTLE_S
    node.tick()
    assert node.kept == []
    node.agent.close()
    node.selector.close()
