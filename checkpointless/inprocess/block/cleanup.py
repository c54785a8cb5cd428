"""What happens between the end of a block and the barrier: the clean-up, and the check that the process is fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import NoReturn, Protocol

from checkpointless.inprocess.abort.composition import after_block
from checkpointless.inprocess.communicators.process_groups import process_groups
from checkpointless.inprocess.compose import taken
from checkpointless.inprocess.deadline import bounded
from checkpointless.inprocess.exceptions import HealthCheckError, line_of
from checkpointless.inprocess.finalize import clean_up_frameworks, collect_garbage
from checkpointless.inprocess.generation import Generation
from checkpointless.inprocess.memory import memory_status
from checkpointless.inprocess.state import HPState
from checkpointless.posix.threads import abandon, waited_for
from checkpointless.telemetry.event_names import EventName


class CleanupSettings(Protocol):
    """The settings of the clean-up; :class:`~checkpointless.inprocess.wrap.HPWrapper` has them.

    Attributes:
        abort: the aborts, some of which have something to do once the main thread has left the block.
        finalize: the user's clean-up, which is called with the rank's state and, if it takes two arguments, the
            exception that ended the block.
        health_check: raises if this process must be replaced.
        abort_timeout: time limit of each part.
        check_memory_status: whether to log the process's memory.
    """

    abort: Callable[[HPState], object]
    finalize: Callable[..., object]
    health_check: Callable[[HPState, BaseException], object]
    abort_timeout: timedelta
    check_memory_status: bool


class BlockCleanup:
    """Cleans up after a block, in the main thread.

    Args:
        generation: the generation that this rank is in.
        settings: the settings of the wrapper.
        replace: ends this process, which a successor takes over, with a reason.
    """

    def __init__(
        self, generation: Generation, settings: CleanupSettings, replace: Callable[[str], NoReturn]
    ) -> None:
        self._generation = generation
        self._settings = settings
        self._replace = replace
        self._threads = waited_for()

    def run(self, state: HPState, term_ex: BaseException) -> None:
        """Clean up, and check this process. A part that takes too long has the process replaced.

        Args:
            state: the rank's place in the job.
            term_ex: the exception that ended the block.

        Raises:
            HealthCheckError: this process must be replaced.
        """
        settings = self._settings
        abandon(waited_for() - self._threads)
        with self._generation.span(EventName.FINALIZE) as fields:
            with self._bounded("the abort"):
                after_block(settings.abort, state)
            with self._bounded("the clean-up"):
                process_groups.hold()  # before any thread can wait in a group's destructor
                settings.finalize(*taken(settings.finalize, (state, term_ex)))
                clean_up_frameworks()  # whatever a finalize of the user's does
            with self._bounded("the destruction of process groups"):
                process_groups.destroy()
                collect_garbage()
            if settings.check_memory_status:
                fields.update(memory_status())
        with self._generation.span(EventName.HEALTH):
            own_limit = getattr(settings.health_check, "timeout", None)
            with self._bounded("the health check", own_limit if isinstance(own_limit, timedelta) else None):
                try:
                    settings.health_check(state, term_ex)
                except Exception as error:
                    raise HealthCheckError(line_of(error)) from error

    def _bounded(self, what: str, beyond: timedelta | None = None) -> AbstractContextManager[None]:
        limit = self._settings.abort_timeout + (beyond or timedelta())
        return bounded(what, limit.total_seconds(), self._replace)
