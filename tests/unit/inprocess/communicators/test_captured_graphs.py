"""Test that graphs are given up beside an abort, but never while they are replayed."""

from __future__ import annotations

import threading

import pytest

from checkpointless.inprocess.communicators.process_groups import _CapturedGraphs, _GraphGivenUpError


class Graph:
    """Stands in for ``torch.cuda.CUDAGraph``: it may be reset only while nobody replays it.

    Args:
        room: a replay waits for it.
    """

    def __init__(self, room: threading.Event | None = None) -> None:
        self.replays = self.resets = 0
        self.began = threading.Event()
        self._room = room
        self._is_replayed = False

    def capture_end(self) -> None:
        """Do nothing."""

    def replay(self) -> None:
        """Count it, when there is room."""
        self._is_replayed = True
        self.began.set()
        if self._room is not None:
            self._room.wait(60)
        self._is_replayed = False
        self.replays += 1

    def reset(self) -> None:
        """Count it."""
        assert not self._is_replayed, "it would be freed under the launch"
        self.resets += 1


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> _CapturedGraphs:
    made = _CapturedGraphs()
    monkeypatch.setattr(Graph, "capture_end", made.noting(Graph.capture_end))
    monkeypatch.setattr(Graph, "replay", made.replaying(Graph.replay))
    return made


def test_a_graph_is_not_reset_while_it_is_replayed(graphs: _CapturedGraphs) -> None:
    aborted = threading.Event()  # the kernels before it, whose end makes room in the queue
    graph = Graph(aborted)
    graph.capture_end()
    replaying = threading.Thread(target=graph.replay)
    replaying.start()
    assert graph.began.wait(60)
    giving_up = threading.Thread(target=graphs.give_up)
    giving_up.start()
    giving_up.join(0.2)
    assert graph.resets == 0
    aborted.set()
    giving_up.join(60)
    replaying.join(60)
    assert (graph.replays, graph.resets) == (1, 1)


def test_a_graph_whose_capture_ends_after_the_abort_began_is_given_up(graphs: _CapturedGraphs) -> None:
    late, next_generations = Graph(), Graph()
    graphs.give_up()
    late.capture_end()
    assert late.resets == 1
    with pytest.raises(_GraphGivenUpError):
        late.replay()
    graphs.begin_generation()
    next_generations.capture_end()
    next_generations.replay()
    assert (next_generations.replays, next_generations.resets) == (1, 0)
