"""How loops of one's own leave ``steps()``, so that what was left is not gone on with after a fault."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from checkpointless.transfer.exchange import all_gather_json

if TYPE_CHECKING:
    from checkpointless.wire.plain import Parsed

_DROPS_ITERATOR = {"POP_TOP", "POP_ITER"}  # how a loop that is left by break or return lets go of what it iterates


class LoopExits:
    """Where the calls of ``steps()`` of one entry of the block were left, and whether a step is to be the last.

    Calls are counted from 0 in each entry. A loop that is entered again makes the same calls, so that one that was
    left behind a step is known by its number.

    Attributes:
        ends: whether the newest step is the last one, as ``stop()`` said.
        resumed_in: the call in which this rank's streams and buffers were kept that it resumed with; None: none.
    """

    def __init__(self) -> None:
        self.ends = False
        self.resumed_in: int | None = None
        self._left: dict[int, int] = {}  # by call: the step behind whose update it was left
        self._calls = 0

    @property
    def calls(self) -> int:
        """How many calls of ``steps()`` have begun."""
        return self._calls

    def begin_call(self) -> int:
        """Count a call of ``steps()``; return its number."""
        self._calls += 1
        return self._calls - 1

    def leave(self, call: int, step: int) -> None:
        """Note that a call was left behind the update of ``step``."""
        self._left[call] = step

    def own(self) -> dict[str, int]:
        """Return what is kept with the streams and buffers of a rank: the number of the newest call."""
        return {"call": self._calls - 1}

    def resume(self, own: Mapping[str, Any] | None) -> None:
        """Note in which call that was kept which this rank resumes with.

        Args:
            own: what :meth:`own` returned then; None: it is lost.
        """
        self.resumed_in = int((own or {}).get("call", 0))

    def was_left(self, call: int, step: int) -> bool:
        """Return whether a call was left before, at ``step`` or earlier."""
        return self._left.get(call, step + 1) <= step

    def take(self) -> dict[str, Any]:
        """Return what is noted, as plain data that nobody changes."""
        return {"ends": self.ends, "left": sorted(self._left.items())}

    def put(self, plain: Mapping[str, Any]) -> None:
        """Note what :meth:`take` returned."""
        self.ends = bool(plain.get("ends"))
        self._left = {int(call): int(step) for call, step in plain.get("left", ())}

    def agree(self, step: int) -> None:
        """Note what any rank has noted, since some were interrupted before they did. Collective.

        Args:
            step: the step that all have resumed after.
        """
        told: list[Parsed] = all_gather_json([self.ends, [[call, at] for call, at in self._left.items()]])
        self.ends = any(ends for ends, _ in told)
        self._left = {int(call): int(at) for _, left in told for call, at in left if at <= step}


def is_left_by_choice(frame: FrameType | None) -> bool:
    """Return whether ``break`` or ``return`` closes a generator, and not an error that passes the loop.

    Args:
        frame: the frame that closes it. What iterates in the loop's name (tqdm) is a generator that is closed, too.
    """
    while frame is not None:
        code = frame.f_code.co_code
        if dis.opname[code[frame.f_lasti]] in _DROPS_ITERATOR:
            return True
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return False
        frame = frame.f_back
    return False
