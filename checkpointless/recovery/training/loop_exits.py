"""How loops of one's own leave ``steps()``, so that what was left is not gone on with after a fault."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from checkpointless.environment import own_rank
from checkpointless.transfer.exchange import all_gather_json

if TYPE_CHECKING:
    from checkpointless.wire.plain import Parsed

_LEFT = (
    "steps() was left by break or return: after a fault that comes before the next call of steps(), or before the "
    "function returns, more steps are made there. Let steps(last) end the loop, or call stop() in its last step, "
    "before update()"
)
_warned: set[str] = set()  # once in a process
logger = logging.getLogger(__name__)


class LoopExits:
    """Where the calls of ``steps()`` of one entry of the block were left, and whether a step is to be the last.

    Calls are counted from 0 in each entry. A loop that is entered again makes the same calls. One that was left is
    known as soon as the next call begins: until then, the loop may be on its way out because of an error.

    Attributes:
        ends: whether the newest step is the last one, as ``stop()`` said.
        resumed_in: the call in which this rank's streams and buffers were kept that it resumed with; None: none.
    """

    def __init__(self) -> None:
        self.ends = False
        self.resumed_in: int | None = None
        self._left: dict[int, int] = {}  # by call: the step after which it was left
        self._calls = 0
        self._under_way: int | None = None

    def begin_call(self, step: int) -> int:
        """Count a call of ``steps()`` after ``step``; return its number. The call before, if not over, was left."""
        if self._under_way is not None:
            self._left[self._under_way] = step
            self.warn_if_left()
        self._under_way = self._calls
        self._calls += 1
        return self._under_way

    def end_call(self) -> None:
        """Note that all steps of the newest call are made."""
        self._under_way = None

    def warn_if_left(self) -> None:
        """Warn, once, if the newest call was left before it was over."""
        if self._under_way is not None and not _warned and own_rank() == 0:
            _warned.add(_LEFT)
            logger.warning(_LEFT)

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
