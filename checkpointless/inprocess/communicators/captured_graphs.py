"""CUDA graphs of this process, which are given up while communicators are aborted.

A graph with captured collectives refers to their communicator, and ``ncclCommAbort`` does not end before the last
such graph is gone (``commFree`` in NCCL's ``init.cc`` polls ``persistentRefs``). A model keeps its graphs until it
is dropped, which the main thread does only when the abort has ended. So the graphs are reset during the abort.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from checkpointless.inprocess.exceptions import RankShouldRestart


class GraphGivenUpError(RankShouldRestart):
    """A graph was replayed that was given up because of a fault."""


class _Guard:
    """Keeps a graph from being reset while it is replayed.

    Attributes:
        lock: held during a replay and during the reset.
        device: the number of the GPU that the graph was captured on; None: there is none.
        is_over: whether the graph was reset.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.is_over = False

    def reset(self, graph: Any) -> None:
        """Reset the graph, once, when it is not replayed."""
        on_device = contextlib.nullcontext() if self.device is None else torch.cuda.device(self.device)
        with self.lock, on_device:
            if not self.is_over:
                self.is_over = True
                graph.reset()


class CapturedGraphs:
    """Knows every CUDA graph that was captured while a block ran, and gives them up."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._are_over = False
        self._guards: weakref.WeakKeyDictionary[Any, _Guard] = weakref.WeakKeyDictionary()

    def give_up(self) -> None:
        """Reset every graph, each as soon as no thread replays it; a later replay of it raises.

        A replay that waits for room in the GPU's queue ends when the kernels before it are aborted.

        Raises:
            RuntimeError: CUDA could not reset a graph.
        """
        with self._mutex:
            self._are_over = True
            guards = list(self._guards.items())
        for graph, guard in guards:
            guard.reset(graph)

    def begin_generation(self) -> None:
        """Keep the graphs that are captured from now on: a generation is over, and all its graphs are known."""
        with self._mutex:
            self._are_over = False

    def noting(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return torch's ``capture_end``, after which the graph is known, or given up if that is too late."""

        @functools.wraps(original)
        def capture_end(graph: Any) -> None:
            try:
                original(graph)
            finally:  # it may hold communicators also if it cannot be replayed
                guard = _Guard()
                with self._mutex:
                    self._guards[graph] = guard
                    is_late = self._are_over
                if is_late:
                    guard.reset(graph)

        return capture_end

    def replaying(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return torch's ``replay``, during which the graph is not reset.

        A graph that is not known was captured before the block, and is replayed as it is.
        """

        @functools.wraps(original)
        def replay(graph: Any) -> None:
            guard = self._guards.get(graph)
            if guard is None:
                original(graph)
                return
            with guard.lock:
                if guard.is_over:
                    raise GraphGivenUpError("this CUDA graph belongs to a generation that is over")
                original(graph)

        return replay
