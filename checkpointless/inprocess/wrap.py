"""``HPWrapper``: re-run a block of code inside a living process until it returns."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from checkpointless.faults.inject import FaultInjector, from_environment
from checkpointless.faults.spec import FaultPhase, FaultSpecError
from checkpointless.inprocess import exceptions
from checkpointless.inprocess.abort import CheckpointlessAbortManager, after_block, communicators_first, taken
from checkpointless.inprocess.communicators.process_groups import process_groups
from checkpointless.inprocess.exceptions import (
    HealthCheckError,
    InternalError,
    RankShouldRestart,
    StateLostError,
    UnrecoverableError,
    forget_frames,
    is_return,
    is_victim,
)
from checkpointless.inprocess.fault_responder import FaultResponder, MainThread
from checkpointless.inprocess.finalize import CheckpointlessFinalizeCleanup, clean_up_frameworks, collect_garbage
from checkpointless.inprocess.generation import Generation, HPState
from checkpointless.inprocess.health_check import CudaHealthCheck, bounded, time_limit, wait_for_device
from checkpointless.inprocess.loader_workers import share_socket_folder
from checkpointless.inprocess.memory import memory_status, reset_peak
from checkpointless.inprocess.parameter_update_lock import ParameterUpdateLock
from checkpointless.inprocess.reentry import (
    Blocks,
    EntryModes,
    EntryStreams,
    SignalHandlers,
    StateKeeper,
    Succession,
    is_imported_by_child,
    require_tracer,
    restart_of,
    tracing,
    with_caller,
)
from checkpointless.inprocess.step_tracker import StepTracker
from checkpointless.launcher.client import HPAgentK8sAPIFactory, RankClient
from checkpointless.launcher.protocol.board import Board, Facts
from checkpointless.launcher.protocol.causes import exit_code
from checkpointless.launcher.protocol.messages import Finish
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.scribe import keep_traceback, without_own_frames
from checkpointless.system.environment import RANK_ENV, own_generation, own_rank
from checkpointless.system.threads import abandon, waited_for

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_DEFAULT_ABORT_TIMEOUT_S = 60.0
_GAVE_UP_EXIT_CODE = 1

_active: HPCallWrapper | None = None


def active_call_wrapper() -> HPCallWrapper | None:
    """Return the wrapper whose block is running in this process, or None."""
    return _active


class HPWrapper:
    """Decorator that makes a function a re-executable code block (RCB).

    ``@HPWrapper()`` on the function that builds and fits the trainer is a complete configuration, and so is
    ``@HPWrapper``: when any rank fails, every rank leaves the function, cleans up, waits for the others at the
    agent's barrier and enters the function again. A parameter of the function that is annotated ``HPCallWrapper``,
    or is named ``caller`` and has no annotation, receives the running :class:`HPCallWrapper` unless the call passes
    a value other than None.

    ``sys.exit()`` and ``sys.exit(0)`` in the function count as a normal return, and the wrapped function returns
    None; ``sys.exit(n)`` ends the job with exit code ``n``. The function runs in the main thread of the process.
    Python's, NumPy's and torch's random streams are in the same state at every entry.

    Args:
        abort: stops the rank's activity after a fault; runs in the fault thread. Default:
            :meth:`~CheckpointlessAbortManager.get_default_checkpointless_abort`.
        finalize: cleans up in the main thread; takes the rank's state and, if it can, the exception that ended
            the block. Default: :class:`CheckpointlessFinalizeCleanup`, which also runs after any other.
        health_check: raises if this process must be replaced. Default: :class:`CudaHealthCheck`.
        hp_api_factory: makes the client of the agent that started this process. Default:
            :class:`HPAgentK8sAPIFactory`.
        abort_timeout: limit, in seconds or as a ``timedelta``, for each part of a restart (update in progress,
            abort, exit from the block, clean-up, health check), after which a rank is replaced. Default: 60 s.
        enabled: False makes the wrapper a pass-through.
        trace_file_path: path of VizTracer's trace, with one file per rank and generation; needs ``viztracer``.
        async_raise_before_abort: interrupt the main thread before the abort, not after it.
        early_abort_communicator: abort the communicators before anything else.
        checkpoint_manager: keeps and restores the state; see :class:`~checkpointless.recovery.CheckpointManager`.
            Default: the strategy installs one.
        check_memory_status: log and record the process's memory at every restart.
        restart: ``"in-process"``: living processes re-enter the function. ``"process"``: new processes take over
            their state at every fault (under ``checkpointless run``).

    Raises:
        TypeError: something else than a function is wrapped.
        ValueError: ``abort_timeout`` is not positive, or ``trace_file_path`` is set and viztracer is not installed,
            or ``restart`` is something else.
    """

    def __new__(cls, fn: Callable[..., Any] | None = None, /, **settings: Any) -> Any:
        """Make a decorator; as one without parentheses, return the wrapped function."""
        return super().__new__(cls) if fn is None else cls(**settings)(fn)

    def __init__(
        self,
        *,
        abort: Callable[[HPState], object] | None = None,
        finalize: Callable[..., object] | None = None,
        health_check: Callable[[HPState, BaseException], object] | None = None,
        hp_api_factory: Callable[[], RankClient] | None = None,
        abort_timeout: float | timedelta | None = None,
        enabled: bool = True,
        trace_file_path: str | None = None,
        async_raise_before_abort: bool = True,
        early_abort_communicator: bool = False,
        checkpoint_manager: StateKeeper | None = None,
        check_memory_status: bool = True,
        restart: str = "in-process",
    ) -> None:
        if trace_file_path is not None:
            require_tracer()
        abort = abort or CheckpointlessAbortManager.get_default_checkpointless_abort()
        self.abort: Callable[[HPState], object] = communicators_first(abort) if early_abort_communicator else abort
        self.finalize: Callable[..., object] = finalize or CheckpointlessFinalizeCleanup()
        self.health_check: Callable[[HPState, BaseException], object] = health_check or CudaHealthCheck()
        self.hp_api_factory: Callable[[], RankClient] = hp_api_factory or HPAgentK8sAPIFactory()
        given = _DEFAULT_ABORT_TIMEOUT_S if abort_timeout is None else abort_timeout
        self.abort_timeout = time_limit("abort_timeout", given)
        self.enabled = enabled
        self.trace_file_path = trace_file_path
        self.async_raise_before_abort = async_raise_before_abort
        self.early_abort_communicator = early_abort_communicator
        self.checkpoint_manager = checkpoint_manager
        self.check_memory_status = check_memory_status
        self.restart = restart_of(restart)

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``fn``, or return it unchanged if the wrapper is disabled."""
        if not callable(fn):
            raise TypeError(f"HPWrapper wraps a function, not {type(fn).__name__}; its settings are given by name")
        if not self.enabled:
            return fn

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if is_imported_by_child(fn) or _active is not None:  # a nested block is part of the outer one
                return fn(*args, **kwargs) if _active is not None else None
            call = HPCallWrapper(self)
            try:
                return call.run(fn, args, kwargs)
            finally:
                call.shutdown()

        return wrapped


class HPCallWrapper:
    """One call of a wrapped function, which runs the block again after every fault until it returns.

    Args:
        wrapper: the wrapper that holds the settings.

    Attributes:
        parameter_update_lock: lock that brackets the optimizer update of this rank.
        checkpoint_manager: keeps the state across restarts (None until the strategy installs one).
        steps: where training stands: the step in progress, and the stages until the first one after a recovery.
        facts: what this rank's block recorded for later generations and for a successor of this process.
        blocks: where this is among the blocks of the script.
        board: this rank's board (None under another launcher).
        restart_in_process: if False, this process is replaced after a fault instead of re-entering the block.
        faults: causes this generation's faults: the job's, or else a script's own (None: there are none).
    """

    def __init__(self, wrapper: HPWrapper) -> None:
        global _active
        self.wrapper = wrapper
        self.parameter_update_lock = ParameterUpdateLock()
        self.checkpoint_manager: StateKeeper | None = wrapper.checkpoint_manager
        self.restart_in_process = True
        self.faults: FaultInjector | None = None
        self.board = Board.from_environment()
        self.facts = Facts(self.board)
        self.blocks = Blocks(self.facts)
        self.client: RankClient = wrapper.hp_api_factory()
        self._now = Generation(own_generation())
        self.steps = StepTracker(self._now, self.board)
        self._succession = Succession(self._now, self.client, self.steps, self.blocks, wrapper.restart)
        self._main = MainThread()
        self._responder = FaultResponder(
            self._now,
            self.client,
            self._main,
            self.parameter_update_lock,
            abort=wrapper.abort,
            timeout=wrapper.abort_timeout,
            raise_before_abort=wrapper.async_raise_before_abort,
            replace=self._succession.replace,
        )
        self._threads = waited_for()
        self._signal_handlers = SignalHandlers()
        self._entry: tuple[EntryStreams, EntryModes] | None = None
        share_socket_folder()
        process_groups.install()
        _active = self

    def __deepcopy__(self, memo: dict[int, Any]) -> HPCallWrapper:
        """Return this wrapper itself: a process has only one, although NeMo deep-copies what a trainer is given."""
        return self

    @property
    def generation(self) -> int:
        """The generation that the block runs in."""
        return self._now.number

    @property
    def is_first(self) -> bool:
        """Whether nothing comes before this generation: the job begins, or begins again as a whole."""
        return self._now.number == self._now.origin

    @property
    def incident(self) -> str | None:
        """The id of the incident that led to this generation (None at the first start)."""
        return self._now.incident

    @property
    def high_water(self) -> int:
        """The highest optimizer step that any rank of the job is known to have committed (-1: none)."""
        return self._now.high_water

    @property
    def recovering_since_s(self) -> float | None:
        """When the fault happened, as far as this node knows, in monotonic-clock seconds (None if unknown)."""
        return self._now.recovering_since_s

    @property
    def step_upon_restart(self) -> int:
        """The number of optimizer steps committed since the block was last entered."""
        return self.steps.since_entry

    def leave_if_over(self) -> None:
        """Leave the block if a fault of its generation is known; called where something is about to be recorded.

        A collective that was aborted returns on GPUs as if it had succeeded. If this call returns, the results of
        the collectives before it are right: a generation is known to be over before it is aborted.

        Raises:
            RankShouldRestart: the generation is over.
        """
        if self._responder.noticed >= self.generation:
            raise RankShouldRestart("a fault has come")

    # ---- the loop

    def run(self, fn: Callable[..., _Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Result | None:
        """Run ``fn`` until it has returned on all ranks; return its result, or None if it left by ``sys.exit(0)``.

        Raises:
            SystemExit: the job cannot continue, or the block has ended it; the agent knows why.
        """
        self.start_hp_fault_handling_thread()
        self.client.hello(self.generation)
        if self.blocks.obstacle:
            self.handle_fn_exception(UnrecoverableError(self.blocks.obstacle))
        self.initialize_barrier()
        while True:
            result, error = self.launch(fn, *args, **kwargs)
            if is_return(error):
                self.client.done(self.generation)
                if isinstance(self.client.wait_finish_or_fault(self.generation), Finish):
                    self.blocks.leave()
                    if self.checkpoint_manager is not None:
                        self.checkpoint_manager.end()
                    return result
            elif error is not None and not self.client.has_launcher:  # nothing regroups this process
                raise without_own_frames(error)
            elif type(error) is SystemExit:
                self._end_job(error)
            elif isinstance(error, (SystemExit, KeyboardInterrupt)):  # this process was told to end
                raise error
            elif error is not None:
                self.handle_fn_exception(error)
            self._succession.judge(error, fn)
            self.restart(RankShouldRestart() if error is None else error)
            result = error = None
            self.initialize_barrier()

    def start_hp_fault_handling_thread(self) -> None:
        """Start the thread that reacts to fault notices."""
        self._responder.start()
        self.client.on_inquire = self._responder.where

    def initialize_barrier(self) -> None:
        """Wait until every rank is ready to enter the block, then adopt the new generation's environment."""
        entering_first = self._responder.aborted < 0
        after = self.generation - 1 if entering_first else self.generation
        with self._now.span(EventName.BARRIER):
            if not entering_first:
                self.client.barrier(self.generation, self._succession.unfit)
            go = self._succession.wait_go(after, self.checkpoint_manager)
        process_groups.release()
        os.environ.update(go.env)
        with self._responder.between_generations():
            now, responder = self._now, self._responder
            now.adopt(go)
            now.recovering_since_s, responder.fault_at_s = responder.fault_at_s, None
            self.steps.enter()
            if self.board is not None:
                self.board.set_generation(go.generation)
            self.parameter_update_lock.open()

    def launch(self, fn: Callable[..., _Result], *a: Any, **kw: Any) -> tuple[_Result | None, BaseException | None]:
        """Run the block once.

        Returns:
            The block's return value and None, or None and the exception that the block raised.
        """
        if self._entry is None:
            self._entry = EntryStreams.capture(), EntryModes()
        else:
            for each in self._entry:
                each.restore()
        self.beat()
        try:
            return self._main.run(lambda: self._block(fn, a, kw)), None
        except BaseException as error:  # noqa: BLE001 - the edge of the block: every end of it is handled by run()
            return None, error

    def _block(self, fn: Callable[..., _Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Result:
        self.leave_if_over()
        self.faults = from_environment(own_rank())
        with tracing(self.wrapper.trace_file_path, self.generation):
            args, kwargs = with_caller(fn, args, kwargs, self)
            return fn(*args, **kwargs)

    def handle_fn_exception(self, call_ex: BaseException) -> None:
        """Report the block's exception to the agent, unless another rank's fault interrupted the block.

        Args:
            call_ex: the exception that the block raised.

        Raises:
            SystemExit: the job cannot continue.
            BaseException: ``call_ex``, because the job is ending.
        """
        if self.client.is_ending:
            raise SystemExit(_GAVE_UP_EXIT_CODE) if isinstance(call_ex, RankShouldRestart) else call_ex
        if isinstance(call_ex, (UnrecoverableError, FaultSpecError)):  # a fault test that cannot run proves nothing
            reason, is_lost = exceptions.text_of(call_ex), isinstance(call_ex, StateLostError)
            self.client.give_up(self.generation, reason, is_lost=is_lost)
            raise SystemExit(_GAVE_UP_EXIT_CODE) from call_ex
        if isinstance(call_ex, RankShouldRestart) and self.client.pending_fault(self.generation) is not None:
            return
        self._responder.note_fault()
        text = exceptions.traceback_of(without_own_frames(call_ex))
        keep_traceback(self.generation, own_rank(), text)
        self.client.report_fault(
            self.generation,
            error=exceptions.name_of(call_ex),
            message=exceptions.text_of(call_ex),
            traceback=text,
            step=self.steps.making,
            victim=is_victim(call_ex),
        )

    def restart(self, term_ex: BaseException) -> None:
        """Abort, keep the state, clean up and check this process, so that it can re-enter the block.

        Args:
            term_ex: the exception that ended the block; its frames are cleared, because they hold the old state.

        If this process cannot continue, it asks to be replaced and ends; this method does not return then.
        """
        self.beat()  # it may have been taken for hung
        self._responder.adopt_incident()
        self.steps.leave()
        self.faults = None  # it may hold the old state
        reset_peak()
        if not self.restart_in_process:
            self._succession.replace("CheckpointlessCallback(enable_inprocess=False) asks for new processes")
        try:
            if not self._responder.abort(self.generation):
                raise InternalError("the update in progress did not end")
            with self._bounded("the device's work"):
                wait_for_device()  # the state that is kept may be in its memory
            if self.checkpoint_manager is not None:
                self.checkpoint_manager.hold(term_ex)
            forget_frames(term_ex)
            self._signal_handlers.restore()
            self._clean_up(HPState.from_environment(self.generation, self.incident), term_ex)
        except (Exception, RankShouldRestart) as error:
            logger.exception("rank %s cannot restart in this process", os.environ.get(RANK_ENV))
            self._succession.replace(exceptions.line_of(error))

    def _clean_up(self, state: HPState, term_ex: BaseException) -> None:
        """Clean up after the block, and check this process. A part that takes too long has the process replaced.

        Raises:
            HealthCheckError: this process must be replaced.
        """
        settings = self.wrapper
        abandon(waited_for() - self._threads)
        with self._now.span(EventName.FINALIZE) as fields:
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
        with self._now.span(EventName.HEALTH):
            own_limit = getattr(settings.health_check, "timeout", None)
            with self._bounded("the health check", own_limit if isinstance(own_limit, timedelta) else None):
                try:
                    settings.health_check(state, term_ex)
                except Exception as error:
                    raise HealthCheckError(exceptions.line_of(error)) from error

    def _bounded(self, what: str, beyond: timedelta | None = None) -> AbstractContextManager[None]:
        limit = self.wrapper.abort_timeout + (beyond or timedelta())
        return bounded(what, limit.total_seconds(), self._succession.replace)

    def shutdown(self) -> None:
        """Stop listening for faults; the process has left the block and does not enter it again."""
        global _active
        _active = None
        self._responder.shutdown()
        self.client.on_inquire = None
        self._main.close()
        process_groups.uninstall()

    # ---- what the block reports

    def beat(self) -> None:
        """Show the agent that the main thread is making progress."""
        if self.board is not None:
            self.board.beat()

    def begin_step(self, step: int) -> None:
        """Report that optimizer step ``step`` begins."""
        self.steps.begin(step)

    def committed(self, step: int) -> None:
        """Report that the rank's state is the state after ``step``."""
        self.steps.committed(step)

    def end_step(self) -> None:
        """Report that the optimizer step in progress is complete and committed."""
        self.steps.end()

    def span(self, stage: EventName, **fields: Any) -> AbstractContextManager[dict[str, Any]]:
        """Return a span of ``stage`` in the event log, of this generation and incident."""
        return self._now.span(stage, **fields)

    def enter_phase(self, phase: str, step: int, target: Callable[[], Any] | None = None) -> None:
        """Report ``phase`` of ``step``, as fault specs name it; ``target`` returns the tensor that it works on."""
        if self.faults is not None:
            self.faults.at(FaultPhase(phase), step, self.generation, target)

    # ---- the end

    def _end_job(self, leaving: SystemExit) -> NoReturn:
        """End the job after the block has called ``sys.exit`` with a code other than 0."""
        at = f" in step {self.steps.making}" if self.steps.making >= 0 else ""
        reason = f"rank {os.environ.get(RANK_ENV, '0')} left the block{at} by sys.exit({leaving.code!r})"
        self.client.give_up(self.generation, reason, exit_code(leaving))
        raise leaving
