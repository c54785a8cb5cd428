"""Whether this process can enter its block again, and how it makes room for a successor if it cannot."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from checkpointless.inprocess.block.blocks import Blocks
from checkpointless.inprocess.block.end import is_victim
from checkpointless.inprocess.exceptions import line_of
from checkpointless.inprocess.generation import Generation
from checkpointless.inprocess.state_keeper import StateKeeper
from checkpointless.inprocess.step_tracker import StepTracker
from checkpointless.launcher.client import AgentClient, AgentLostError, RankClient, SuccessorWantedError
from checkpointless.launcher.protocol.messages import Go
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.scribe import flush_all
from checkpointless.system.environment import RANK_ENV

logger = logging.getLogger(__name__)

REPLACED_EXIT_CODE = 75  # EX_TEMPFAIL: the agent starts a successor
RESTARTS = ("in-process", "process")
_ASKED_FOR = 'HPWrapper(restart="process") replaces processes at every fault'
_PACKAGE = str(Path(__file__).parents[2])


def restart_of(restart: str) -> str:
    """Return the way of restarting, if there is such a one.

    Raises:
        ValueError: there is none.
    """
    if restart not in RESTARTS:
        raise ValueError(f"restart is {' or '.join(map(repr, RESTARTS))}, and not {restart!r}")
    return restart


class Succession:
    """Judges whether the block can be entered again in this process, and lets a successor take over.

    A function may do what a process can do only once. It is taken for one that does if its block, of which this
    process has made steps, is entered again and raises before it comes to its training, or twice in a row before
    the first step.

    Args:
        generation: the generation that this rank is in.
        client: the agent's client.
        steps: how far training has come in this entry of the block.
        blocks: where the block is among those of the script.
        restart: the way of restarting, one of :data:`RESTARTS`.

    Attributes:
        unfit: why this process cannot enter its block again, in one line ("": it can).
    """

    def __init__(
        self, generation: Generation, client: RankClient, steps: StepTracker, blocks: Blocks, restart: str
    ) -> None:
        self.unfit = ""
        if restart == "process" and isinstance(client, AgentClient):
            self.unfit = _ASKED_FOR
        elif restart == "process":
            logger.warning("%s only under `checkpointless run`: they re-enter the block in place", _ASKED_FOR)
        self._generation = generation
        self._client = client
        self._steps = steps
        self._blocks = blocks
        self._has_trained = False
        self._failures = 0  # in a row

    def judge(self, error: BaseException | None, fn: Callable[..., Any]) -> None:
        """Take into account how the block ended.

        Args:
            error: the exception that ended it.
            fn: the block's function.
        """
        if self._steps.has_begun:
            self._has_trained, self._failures = self._has_trained or self._steps.since_entry > 0, 0
            return
        if error is None or is_victim(error) or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return  # memory is freed, and the block entered again in place
        if not self._has_trained or _is_of_the_engine(error) or self._blocks.left:
            return
        self._failures += 1
        if self._failures > self._steps.recovers and not self.unfit:
            rank, place = os.environ.get(RANK_ENV, "0"), _place_of(error, fn) or "what raised that"
            self.unfit = (
                f"rank {rank} could not enter its block again ({line_of(error)}): a process can do only once what "
                f"stands there; move {place} in front of the function that HPWrapper wraps"
            )

    def wait_go(self, after_generation: int, keeper: StateKeeper | None) -> Go:
        """Wait at the barrier for the next generation; or hand the state to a successor, and end this process.

        A process whose state finds no room enters its block again, unless it is known that it cannot.

        Args:
            after_generation: the generation that this rank has left.
            keeper: keeps the state; None: nothing does.
        """
        try:
            return self._client.wait_go(after_generation)
        except SuccessorWantedError as wanted:
            problem = self._hand_over(keeper, wanted.high_water)
        logger.error("rank %s stays in its process: %s", os.environ.get(RANK_ENV), problem)
        self._client.barrier(self._generation.number)
        return self._client.wait_go(after_generation)

    def _hand_over(self, keeper: StateKeeper | None, high_water: int) -> str:
        """Hand the state to a successor of this process, and end; return only if the process had better stay.

        Args:
            keeper: keeps the state; None: nothing does.
            high_water: the highest optimizer step that any rank was ever seen to commit (-1: none).

        Returns:
            Why the state could not be handed over.
        """
        with self._generation.span(EventName.HAND_OVER) as fields:
            nbytes, problem = keeper.hand_over(high_water) if keeper is not None else (0, "")
            fields.update(bytes=nbytes, reason=problem)
        problem = f"its state could not be handed over: {problem}" if problem else ""
        if problem and self.unfit == _ASKED_FOR:
            return problem
        if problem:
            self.replace(problem)
        self._end("a successor takes its place", handed_over=nbytes > 0, level=logging.INFO)

    def replace(self, reason: str) -> NoReturn:
        """Ask for a successor and end this process at once, since nothing in it can be trusted."""
        self._end(reason, handed_over=False, level=logging.ERROR)

    def _end(self, reason: str, *, handed_over: bool, level: int) -> NoReturn:
        try:
            self._client.request_replacement(self._generation.number, reason, handed_over)
            logger.log(level, "rank %s is replaced: %s", os.environ.get(RANK_ENV), reason)
        except AgentLostError:
            logger.error("no agent to replace this process: %s", reason)
        flush_all()
        os._exit(REPLACED_EXIT_CODE)


def _is_of_the_engine(error: BaseException) -> bool:
    """Return whether an exception was raised by this package, which can do again all that it does."""
    *_, last = traceback.extract_tb(error.__traceback__) or [None]
    return last is not None and last.filename.startswith(_PACKAGE + os.sep)


def _place_of(error: BaseException, fn: Callable[..., Any]) -> str:
    """Return the innermost call in the user's script on the way to an exception; "" if there is none."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    scripts = {getattr(code, "co_filename", None), getattr(sys.modules.get("__main__"), "__file__", None)}
    lines = [each for each in traceback.extract_tb(error.__traceback__) if each.filename in scripts]
    calls = [each for each in lines if each.line and not each.line.startswith(("raise", "assert"))]
    return f"line {calls[-1].lineno} of {Path(calls[-1].filename).name} ({calls[-1].line})" if calls else ""
