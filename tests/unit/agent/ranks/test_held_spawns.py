"""Test how processes are held while their devices are looked at, and reported when these are bad."""

from __future__ import annotations

import time
from collections.abc import Callable

from checkpointless.agent.ranks.held_spawns import HELD_LIMIT_S, REPORT_AGAIN_S
from checkpointless.devices.health import DeviceSurvey
from checkpointless.wire.node_messages import DeviceBad, Joined, Kill, NodeMessage, RankEnded
from checkpointless.wire.rank_state import RankState
from tests.unit.agent.ranks.guarded_node import FATAL, WARNING, GuardedNode, survey


def test_a_rank_is_not_started_on_a_bad_device_unless_it_is_said_so(
    make: Callable[[DeviceSurvey], GuardedNode],
) -> None:
    node = make(survey((), ()))
    node.begin()
    node.looks.found = survey((), (FATAL, WARNING))
    node.ends(0)
    node.spawn(0, 1)
    node.tick_until(lambda: isinstance(node.said[-1], DeviceBad))
    assert node.said[-1] == DeviceBad(0, 1, "GPU 1 (H100, GPU-1)", FATAL.what)
    assert "GPU 1 (H100, GPU-1): must not be used: the driver wants a reset" in node.printed
    for _ in range(5):
        node.agent.tick(time.monotonic())
    assert isinstance(node.said[-1], DeviceBad)
    assert not node.is_started(0)
    node.spawn(0, 1, anyway=True)
    node.tick_until(lambda: node.is_started(0))


def test_no_start_is_held_for_longer_than_its_limit(make: Callable[..., GuardedNode]) -> None:
    node = make(survey((), ()), limit_s=1e6)
    node.begin()
    node.looks.go_on.clear()
    node.ends(0)
    node.spawn(0, 1)
    node.later_s += HELD_LIMIT_S
    node.tick_until(lambda: node.is_started(0))
    assert "is used without a look" in node.printed[-1]


def test_a_refused_device_is_reported_again_until_it_is_answered_or_in_order(
    make: Callable[[DeviceSurvey], GuardedNode],
) -> None:
    node = make(survey((), ()))
    node.begin()
    node.looks.found = survey((), (FATAL,))
    node.ends(0)
    node.spawn(0, 1)
    reports = [DeviceBad(0, 1, "GPU 1 (H100, GPU-1)", FATAL.what)]

    def reported() -> list[NodeMessage]:
        return [message for message in node.said if isinstance(message, DeviceBad)]

    node.tick_until(lambda: reported() == reports)
    node.agent.standing()  # to a coordinator that has not heard of it
    node.tick_until(lambda: reported() == 2 * reports)
    node.later_s += REPORT_AGAIN_S
    node.tick_until(lambda: reported() == 3 * reports)
    node.looks.found = survey((), ())
    node.later_s += REPORT_AGAIN_S
    node.tick_until(lambda: node.is_started(0))
    node.spawn(0, 1, anyway=True)  # the answer crosses the start
    node.agent.tick(time.monotonic())
    assert node.agent.outcome is None


def test_a_process_that_is_killed_meanwhile_is_not_started_anyway(
    make: Callable[[DeviceSurvey], GuardedNode],
) -> None:
    node = make(survey((), ()))
    node.begin()
    node.looks.found = survey((), (FATAL,))
    node.ends(0)
    node.spawn(0, 1)
    node.tick_until(lambda: isinstance(node.said[-1], DeviceBad))
    node.agent.obey(Kill(0, 1, -1))
    node.spawn(0, 1, anyway=True)
    node.agent.tick(time.monotonic())
    assert not node.is_started(0)
    node.looks.found = survey((), ())
    node.spawn(0, 2)
    node.tick_until(lambda: node.is_started(0))


def test_a_look_that_fails_at_the_begin_is_said_and_made_again(make: Callable[[DeviceSurvey], GuardedNode]) -> None:
    error = "the process that asks NVML did not start within 10 s"
    node = make(DeviceSurvey(error=error))
    node.begin()
    assert node.printed == [f"warning: {error}"]
    node.looks.found = survey((), (FATAL,))
    node.ends(0)
    node.spawn(0, 1)
    node.tick_until(lambda: isinstance(node.said[-1], DeviceBad))


def test_a_held_process_that_is_killed_has_ended(make: Callable[[DeviceSurvey], GuardedNode]) -> None:
    node = make(survey((), ()))
    node.begin()
    node.looks.go_on.clear()
    node.ends(0)
    node.spawn(0, 1)
    node.agent.obey(Kill(0, 1, -1))
    assert isinstance(node.said[-1], RankEnded)
    assert node.said[-1].forgiven
    assert node.agent.ranks[0].state is RankState.GONE
    node.looks.go_on.set()
    for _ in range(5):
        node.agent.tick(time.monotonic())
    assert not node.is_started(0)


def test_a_node_joins_with_what_is_wrong_with_the_devices_of_its_ranks(
    make: Callable[[DeviceSurvey], GuardedNode],
) -> None:
    node = make(survey((), (FATAL,), (FATAL,)))
    node.tick_until(lambda: node.agent.joined)
    assert node.said == [Joined("GPU 1 (H100, GPU-1): the driver wants a reset")]


def test_a_node_joins_once_its_devices_are_known(make: Callable[[DeviceSurvey], GuardedNode]) -> None:
    node = make(survey((), ()))
    node.tick_until(lambda: node.agent.joined)
    assert node.said == [Joined()]
