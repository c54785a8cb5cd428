"""Test what an agent keeps, says again and gives up when its link to a coordinator elsewhere is lost."""

import selectors
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointless.launcher.agent import links
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.launcher.agent.links import JoinError, _RefusedError, _RemoteLink
from checkpointless.launcher.protocol.causes import CauseKind
from checkpointless.launcher.protocol.messages import Alive, Discard, End, Progress, RankEnded, Standing
from tests.unit.agent.commanded_node import SEVERAL
from tests.unit.messaged_job import trouble
from tests.waiting import wait_until

STANDING = Standing(3, 1, 7, "a run", False, [])
TROUBLE = trouble(3, CauseKind.EXCEPTION)
ENDED = RankEnded(-9, False, "rank-2.log", [], rank=2, incarnation=0, committed=7, making=8)


class Coordinators:
    """Stands for all coordinators that are ever joined, one after the other."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.heard: list[Any] = []
        self.lose: Callable[[str], None]
        self.refusal: JoinError | None = None
        self.own_address, self.where, self.bytes_heard = "10.0.0.2", "node0:29400", 0

    def join(self, _config: object, number: int, *_limits: object) -> Any:
        self.numbers.append(number)
        if self.refusal is not None:
            raise self.refusal
        return self

    def open(self, selector: object, on_message: object, on_close: Callable[[str], None]) -> Any:
        self.lose = on_close
        return self

    def send(self, message: Any) -> None:
        if not isinstance(message, Alive):
            self.heard.append(message)

    def close(self) -> None:
        """Do nothing; nothing is open."""


class Agent(SimpleNamespace):
    """Stands in for an agent, with as much of it as a link needs."""

    def __init__(self, *ranks: int) -> None:
        processes = SimpleNamespace(can_start=True, is_discarding=False)
        super().__init__(ranks=dict.fromkeys(ranks), job=SimpleNamespace(outcome=None), processes=processes)
        self.has_ended_well, self.grace_s = False, 0.0
        self.takes_part, self.has_moved, self.offers = bool(ranks), False, False

    def alive(self) -> list[Any]:
        return [*self.ranks] if self.offers else []

    def obey(self, command: Discard) -> None:
        self.offers = False

    def standing(self) -> Standing:
        self.link.report(ENDED)
        return STANDING

    def end(self, outcome: End, grace_s: float = 5.0) -> None:
        self.job.outcome, self.grace_s = outcome, grace_s


class Scene:
    """A link to them, of an agent with ranks 2 and 3 that was a spare."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.coordinators, self.agent, self.said = Coordinators(), Agent(2, 3), list[str]()
        config = LaunchConfig(script=__file__, run_dir=folder, nproc_per_node=2, spares=1, node_rank=2, **SEVERAL)
        patch.setattr(links, "_Joining", self.coordinators.join)
        self.link = _RemoteLink(config, selectors.DefaultSelector(), [], self.said.append)
        self.agent.link = self.link

    def deliver(self) -> None:
        self.link.deliver(self.agent, time.monotonic())  # type: ignore[arg-type]

    def until(self, condition: Callable[[], object]) -> None:
        wait_until(condition, meanwhile=self.deliver)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_what_went_wrong_meanwhile_is_told_before_the_standing_and_a_spare_keeps_its_number(scene: Scene) -> None:
    scene.coordinators.lose("it closed the connection")
    scene.deliver()
    scene.link.report(TROUBLE)
    scene.link.report(ENDED)  # the agent tells it again
    scene.link.report(Progress(7, 7, 8, 0))
    scene.until(lambda: scene.coordinators.heard)
    assert (scene.coordinators.heard, scene.coordinators.numbers) == ([TROUBLE, ENDED, STANDING], [-1, 1])
    assert scene.said[-1] == "the coordinator at node0:29400 is back"


def test_a_node_whose_ranks_have_moved_joins_again_as_a_spare(scene: Scene) -> None:
    scene.coordinators.lose("it closed the connection")
    scene.until(lambda: scene.coordinators.heard)
    scene.agent.takes_part, scene.agent.has_moved, scene.agent.offers = False, True, True
    scene.coordinators.lose("it closed the connection")
    scene.until(lambda: len(scene.coordinators.numbers) == 3)
    assert scene.coordinators.numbers == [-1, 1, -1]
    assert not scene.agent.offers, "who offers a state ends: a later coordinator knows nothing of the move"


@pytest.mark.parametrize("has_ended_well", [False, True])
@pytest.mark.parametrize(
    ("refusal", "grace_s"),
    [(JoinError("it was not reached within 2 s"), 5.0), (_RefusedError("node 1 is here already"), 0.0)],
)
def test_a_search_in_vain_ends_the_ranks_and_at_once_if_others_have_their_place(
    scene: Scene, refusal: JoinError, grace_s: float, has_ended_well: bool
) -> None:
    """Ranks that ended well need no coordinator to say so."""
    scene.coordinators.refusal, scene.agent.has_ended_well = refusal, has_ended_well
    scene.coordinators.lose("no word")
    scene.until(lambda: scene.agent.job.outcome)
    if has_ended_well:
        assert scene.agent.job.outcome == End(0, [])
        return
    assert (scene.agent.job.outcome.code, scene.agent.grace_s) == (1, grace_s)
    assert str(refusal) in scene.agent.job.outcome.last_words


def test_a_node_that_ends_its_ranks_does_not_offer_them_to_another_coordinator(scene: Scene) -> None:
    scene.agent.processes.is_discarding = True
    scene.coordinators.lose("it closed the connection")
    scene.until(lambda: scene.said[-1:] == ["the coordinator at node0:29400 is back"])
    assert scene.coordinators.heard == []
