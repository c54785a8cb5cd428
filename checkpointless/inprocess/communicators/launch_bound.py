"""Bound how far launches run ahead of the GPU, so that no launch blocks while it holds the interpreter lock.

A launch blocks when the GPU's queue is full (about 1,024 launches), milliseconds after a collective that waits for
a lost rank. Bindings that keep the interpreter lock meanwhile (about half of TransformerEngine's) stop every thread
of the process, also the one that would abort the collective. So the host waits for the GPU after a few layers.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from checkpointless.system.environment import LAUNCH_AHEAD_ENV

#: With at most about 100 launches per layer and direction, this stays below 1,024.
DEFAULT_LAYERS = 8


class LaunchBound:
    """Keeps the launches of a model's layers, in either direction, at most ``layers`` (1 or more) ahead."""

    def __init__(self, layers: int, make_event: Callable[[], Any] | None = None) -> None:
        if layers < 1:
            raise ValueError(f"at least one layer must run ahead, not {layers}")
        self._layers = layers
        self._make = make_event or (lambda: torch.cuda.Event(blocking=True))
        self.restart()

    def restart(self) -> None:
        """Forget what was launched, because it was aborted. A model that is watched stays so."""
        self._free: deque[Any] = deque(self._make() for _ in range(self._layers + 1))
        self._recorded: deque[Any] = deque()

    def watch(self, model: torch.nn.Module) -> int:
        """Pass at each layer of ``model``, both ways; return how many. Graphs refuse to capture such layers."""
        found = _layers_of(model)
        for layer in found:
            layer.register_forward_pre_hook(lambda *_: self.at_layer())
            parameter = next((each for each in layer.parameters() if each.requires_grad), None)
            if parameter is not None:
                parameter.register_hook(lambda _: self.at_layer())
        return len(found)

    def at_layer(self) -> None:
        """Record what was launched; wait for the GPU if that is too far ahead, but not in a graph's capture."""
        if torch.cuda.is_current_stream_capturing():
            return
        event = self._free.popleft()
        event.record()
        self._recorded.append(event)
        if not self._free:
            oldest = self._recorded.popleft()
            self._free.append(oldest)
            oldest.synchronize()


def _layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of ``model``: the elements of its lists of modules, the outermost ones where lists nest."""
    found: list[torch.nn.Module] = []
    for child in model.children():
        if isinstance(child, torch.nn.ModuleList):
            found += child
        else:
            found += _layers_of(child)
    return found


def from_environment() -> LaunchBound | None:
    """Return the bound that the environment asks for; None if it asks for none, or this process uses no GPU."""
    text = os.environ.get(LAUNCH_AHEAD_ENV, str(DEFAULT_LAYERS))
    try:
        layers = int(text)
    except ValueError:
        raise ValueError(f"{LAUNCH_AHEAD_ENV} is a number of layers (0: no bound), not {text!r}") from None
    return LaunchBound(layers) if layers > 0 and torch.cuda.is_initialized() else None
