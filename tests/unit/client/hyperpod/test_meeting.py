"""Test how ranks meet in the store of rank 0; a thread of this process plays each rank."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from checkpointless.launcher.client.hyperpod.client import Start, _MeetingPlace
from checkpointless.launcher.protocol.messages import Go
from tests.ports import free_port


def start(rank: int, world_size: int, port: int, generation: int = 4) -> Start:
    return Start(generation, rank, world_size, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})


def at_once(calls: list[Callable[[], object]]) -> list[object]:
    """Make each call in a thread of its own, and return what the calls return."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(30) for future in [threads.submit(call) for call in calls]]


def test_ranks_meet_and_part() -> None:
    """They agree on the highest step that any of them knows of."""
    port, stopped = free_port(), threading.Event()
    places = [_MeetingPlace(20, stopped) for _ in range(2)]
    met = at_once(
        [
            lambda: places[0].meet(start(0, 2, port), high_water=3),
            lambda: places[1].meet(start(1, 2, port), high_water=7),
        ]
    )
    assert all(isinstance(go, Go) and (go.generation, go.incident, go.high_water) == (4, "4", 7) for go in met)
    assert met[0] == met[1]
    at_once([partial(done, place, rank) for rank, place in enumerate(places)])


def done(place: _MeetingPlace, rank: int) -> None:
    place.wait_until_all_are_done(rank, 2, lambda: False)


def test_a_rank_that_was_not_met_is_not_waited_for() -> None:
    with pytest.raises(RuntimeError, match="has met no other rank"):
        _MeetingPlace(1, threading.Event()).wait_until_all_are_done(0, 1, lambda: False)


def test_a_meeting_that_is_called_off_is_over_for_good_and_the_next_is_not() -> None:
    port, place = free_port(), _MeetingPlace(60, threading.Event())
    threading.Timer(0.3, place.call_off).start()
    assert place.meet(start(0, 2, port), high_water=-1) is None
    assert place.is_called_off
    place.prepare()
    met = place.meet(start(0, 1, port, generation=5), high_water=-1)
    assert met is not None
    assert met.generation == 5


def test_the_end_frees_a_rank_that_waits_for_the_others() -> None:
    stopped = threading.Event()
    place = _MeetingPlace(60, stopped)
    threading.Timer(0.3, stopped.set).start()
    assert place.meet(start(0, 2, free_port()), high_water=-1) is None
    place.wait_until_free()
