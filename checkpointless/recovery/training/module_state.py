"""What belongs to modules and is no tensor: whether they train, and what they save as their extra state."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from checkpointless.serialization import state_tree

_training = operator.attrgetter("training")
#: TransformerEngine's modules save FP8's scales so, in a pickle; FP8 is refused in loops of one's own.
_SAVES_NOTHING = "transformer_engine"


class ModuleState:
    """Takes and puts back what modules have beside parameters and buffers.

    Args:
        modules: the modules; those in them belong to them.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._parts = [part for module in modules for part in module.modules()]
        self._saving: list[tuple[int, Any]] = [
            (index, part)
            for index, part in enumerate(self._parts)
            if type(part).get_extra_state is not torch.nn.Module.get_extra_state
            and not type(part).__module__.startswith(_SAVES_NOTHING)
        ]

    def take(self) -> dict[str, Any]:
        """Return, as nobody changes it, which modules train, and what ``get_extra_state`` of each returns."""
        state: dict[str, Any] = {"modes": list(map(_training, self._parts))}
        if self._saving:
            state["extra"] = {index: state_tree.copy(part.get_extra_state()) for index, part in self._saving}
        return state

    def put(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`take` returned; nothing that is not in ``state``."""
        self.put_modes(state.get("modes", ()))
        for index, part in self._saving:
            if index in state.get("extra", {}):
                part.set_extra_state(state_tree.copy(state["extra"][index]))

    def put_modes(self, modes: Iterable[bool]) -> None:
        """Let those modules train that do in ``modes``, and no others."""
        for part, training in zip(self._parts, modes):
            part.training = training

    def unfit(self) -> str | None:
        """Return why a module's extra state cannot be carried over to another process; None: each can be."""
        for _, part in self._saving:
            try:
                state_tree.check(part.get_extra_state())
            except state_tree.StateTreeError as error:
                return f"{type(part).__name__}.get_extra_state returns what cannot travel ({error})"
        return None


def unfit_hooks(modules: Iterable[torch.nn.Module]) -> str | None:
    """Return why a communication hook of DDP's cannot be protected; None: there is none that keeps something.

    Args:
        modules: the modules that are trained.
    """
    for module in modules:
        for hook, state in getattr(module, "_comm_hooks", ()):
            if state is not None and not isinstance(state, torch.distributed.ProcessGroup):
                return (
                    f"the communication hook {getattr(hook, '__name__', hook)} keeps a {type(state).__name__} from "
                    "step to step, which no recovery would bring back: use one without a state "
                    "(fp16_compress_hook, bf16_compress_hook)"
                )
    return None
