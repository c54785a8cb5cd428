"""``HPWrapper``: re-run a block of code inside a living process until it returns.

Before it is entered again, the process is made as it was at the first entry, or a successor takes over. What the
rest of the package needs from the running block (its board, its events) is at the end.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.data._utils import signal_handling as torch_workers

from checkpointless.faults.inject import FaultInjector
from checkpointless.faults.spec import FaultPhase, FaultSpecError
from checkpointless.inprocess import exceptions
from checkpointless.inprocess.abort import (
    CheckpointlessAbortManager,
    Compose,
    HPAbortTorchDistributed,
    share_socket_folder,
    taken,
)
from checkpointless.inprocess.communicators.process_groups import process_groups
from checkpointless.inprocess.exceptions import (
    HealthCheckError,
    InternalError,
    RankShouldRestart,
    StateLostError,
    UnrecoverableError,
    forget_frames,
    is_victim,
    line_of,
)
from checkpointless.inprocess.fault_responder import FaultResponder, MainThread
from checkpointless.inprocess.finalize import CheckpointlessFinalizeCleanup, collect_garbage
from checkpointless.inprocess.generation import Generation, HPState, StepTracker
from checkpointless.inprocess.health_check import CudaHealthCheck, bounded, time_limit, wait_for_device
from checkpointless.inprocess.memory import memory_status, reset_peak
from checkpointless.inprocess.pace import StepPace
from checkpointless.inprocess.parameter_update_lock import ParameterUpdateLock
from checkpointless.launcher.client import AgentClient, AgentLostError, HPAgentK8sAPIFactory, RankClient
from checkpointless.launcher.protocol.board import Board, Facts
from checkpointless.launcher.protocol.causes import exception_cause, exit_code
from checkpointless.launcher.protocol.messages import (
    Barrier,
    Done,
    FaultReport,
    Finish,
    GiveUp,
    Go,
    HandOver,
    Hello,
    Inexact,
    Offered,
    Paused,
    Replace,
)
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.scribe import flush_all, keep_traceback, without_own_frames
from checkpointless.system.environment import RANK_ENV, STRICT_ENV, YES, own_generation, own_rank
from checkpointless.system.threads import abandoned, waited_for

logger = logging.getLogger(__name__)


class HandedOver(NamedTuple):
    """Bytes for a successor in the node's memory, the ``problem`` if none, ``source`` of an offer, and its end."""

    nbytes: int = 0
    problem: str = ""
    source: str = ""
    withdraw: Callable[[], None] = lambda: None


class _StateKeeper(Protocol):
    """Keeps the state of training from one run of the block to the next, as a ``CheckpointManager`` does."""

    def hold(self, error: BaseException | None = None) -> None:
        """Hold the state that ``error`` ended, in the main thread, after the abort, before anything is cleared."""

    def hand_over(self, high_water: int, address: str = "") -> HandedOver:
        """Hand the state to a successor of this process; at ``address``, offer it to one on another node."""

    def end(self) -> None:
        """Let go of everything that was kept for a fault, since the block has returned on all ranks."""


_LEFT, _TRAINED = "blocks_left", "trained_in_block"  # facts
_SECOND_TRAINING = (
    "a block before this one has trained in this job, whose steps are counted: train in one function that "
    "HPWrapper() wraps (it may call several fits), or in a job for each"
)
_BEGUN_ANEW = (
    "a process was lost behind a block that all ranks had left, and its successor would run that block again: do "
    "all that is to be recovered in one function that HPWrapper() wraps"
)
_IN_CHILD = "__mp_main__"  # the name of the script there
_left = 0  # in this process


def _is_imported_by_child(fn: Callable[..., object]) -> bool:
    """Return, and say, whether ``fn``'s script is imported by a process it started ("spawn"): no block there."""
    is_over = sys.modules["__main__"].__name__ == _IN_CHILD  # the import: then a block may be the child's work
    if is_over or getattr(fn, "__module__", "") != _IN_CHILD:
        return False
    logger.warning(
        "the wrapped function is not entered in a child process that imports the script: put the lines that call "
        'it under `if __name__ == "__main__":`, so that nothing of them runs there'
    )
    return True


class _Blocks:
    """Where a rank's script stands among its blocks when one is entered; ``facts`` outlive this process."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._number = _left
        self._when_left: Callable[[], None] = lambda: None

    @property
    def left(self) -> int:
        """How many blocks all ranks have left in this process, which a successor would run again."""
        return self._number

    @property
    def obstacle(self) -> str:
        """Why this block cannot be entered: this process is a successor of one that has left it; "" if it can."""
        return _BEGUN_ANEW if self._facts.get(_LEFT, 0) > self._number else ""

    def begin_training(self, when_left: Callable[[], None] = lambda: None) -> None:
        """Note at every entry that this block trains; ``UnrecoverableError`` if another has."""
        if self._facts.get(_TRAINED, self._number) != self._number:
            raise UnrecoverableError(_SECOND_TRAINING)
        self._facts.keep(_TRAINED, self._number)
        self._when_left = when_left

    def leave(self) -> None:
        global _left
        self._when_left()
        _left = self._number + 1
        self._facts.keep(_LEFT, _left)


REPLACED_EXIT_CODE = 75  # EX_TEMPFAIL: the agent starts a successor
_RESTARTS = ("in-process", "process")
_ASKED_FOR = 'HPWrapper(restart="process") replaces processes at every fault'
_NO_SUCCESSORS = (
    'HPWrapper(restart="process") needs `checkpointless run`, since no other launcher starts a successor of one '
    "process: start the job with it, or leave out restart= (faults are then recovered from in place)"
)
_PACKAGE = str(Path(__file__).parents[1])


class _Succession:
    """Judges whether the block can be entered again in this process, and lets a successor take over.

    A function is taken for one that can be done once only if its block, of which steps were made, raises at its
    entry before its training (twice in a row if a fault was known: an aborted collective returns anything), or
    twice in a row before the first step. ``unfit`` says why ("": it can).
    """

    def __init__(
        self, generation: Generation, client: RankClient, steps: StepTracker, blocks: _Blocks, restart: str
    ) -> None:
        self.unfit = ""
        if restart == "process" and isinstance(client, AgentClient):
            self.unfit = _ASKED_FOR
        elif restart == "process" and client.has_launcher:
            raise ValueError(_NO_SUCCESSORS)
        self._generation, self._client = generation, client
        self._steps, self._blocks = steps, blocks
        self._has_trained = False
        self._failures = 0  # in a row

    def judge(self, error: BaseException | None, fn: Callable[..., Any], is_over: bool) -> None:
        if self._steps.has_begun:
            self._has_trained, self._failures = self._has_trained or self._steps.since_entry > 0, 0
            return
        if error is None or is_victim(error) or exceptions.is_out_of_memory(error):
            return  # memory is freed, and the block entered again in place
        if not self._has_trained or _is_of_the_engine(error) or self._blocks.left:
            return
        self._failures += 1
        if self._failures > max(self._steps.recovers, is_over) and not self.unfit:
            rank, place = os.environ.get(RANK_ENV, "0"), _place_of(error, fn) or "what raised that"
            self.unfit = (
                f"rank {rank} could not enter its block again ({line_of(error)}): a process can do only once what "
                f"stands there; move {place} in front of the function that HPWrapper wraps"
            )

    def wait_go(self, after_generation: int, keeper: _StateKeeper | None) -> Go:
        """Wait at the barrier for the next generation, and offer the state meanwhile if it is asked for.

        If the state goes to a successor, this process ends, unless it finds no room and the block can be entered.
        """
        left = HandedOver()
        while True:
            try:
                heard = self._client.wait_go(after_generation)
            except SystemExit as leaving:
                if leaving.code:  # the job is ending
                    raise
                flush_all()
                os._exit(0)  # with the wait's event open: the wait of its successor counts
            if isinstance(heard, Go):
                left.withdraw()
                return heard
            if isinstance(heard, HandOver):
                problem = self._hand_over(keeper, heard.high_water)
                logger.error("rank %s stays in its process: %s", os.environ.get(RANK_ENV), problem)
                self._client.send(Barrier(self._generation.number))
                continue
            with self._generation.span(EventName.HAND_OVER) as fields:
                left = keeper.hand_over(heard.high_water, heard.address) if keeper is not None else HandedOver()
                fields.update(reason=left.problem)
            self._client.send(Offered(self._generation.number, left.source, left.problem))

    def _hand_over(self, keeper: _StateKeeper | None, high_water: int) -> str:
        """Hand the state to a successor, and end; return, with the reason, only if the process had better stay."""
        with self._generation.span(EventName.HAND_OVER) as fields:
            left = keeper.hand_over(high_water) if keeper is not None else HandedOver()
            fields.update(bytes=left.nbytes, reason=left.problem)
        problem = f"its state could not be handed over: {left.problem}" if left.problem else ""
        if problem and self.unfit == _ASKED_FOR:
            return problem
        if problem:
            self.replace(problem)
        self._end("a successor takes its place", handed_over=left.nbytes > 0, level=logging.INFO)

    def replace(self, reason: str) -> NoReturn:
        """Ask for a successor and end this process at once, since nothing in it can be trusted."""
        self._end(reason, handed_over=False, level=logging.ERROR)

    def _end(self, reason: str, *, handed_over: bool, level: int) -> NoReturn:
        try:
            self._client.send(Replace(self._generation.number, reason, handed_over))
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


_PAUSE_LIMIT_S = 60.0
_PAUSE_TICK_S = 0.005


class _Pause:
    """The wait of all ranks at one step boundary, agreed by a vote; ``is_agreed``: before the next step."""

    def __init__(self, generation: Generation, client: RankClient) -> None:
        self.is_agreed = False
        self._generation, self._client = generation, client

    @property
    def is_wanted(self) -> bool:
        """Whether the ranks of this generation are to pause, as far as this one knows."""
        return self._client.to_pause == self._generation.number

    def wait(self, beat: Callable[[], None], leave_if_over: Callable[[], None]) -> None:
        """Wait until the agent ends the generation, with ``beat`` for it, or, if its coordinator is lost, go on."""
        self.is_agreed = False
        wait_for_device()
        self._client.send(Paused(self._generation.number))
        until_s = time.monotonic() + _PAUSE_LIMIT_S
        while time.monotonic() < until_s:
            beat()
            leave_if_over()
            time.sleep(_PAUSE_TICK_S)
        self._client.to_pause = -1  # until it is asked for again
        logger.warning("the move of a node has not begun within %g s: training goes on", _PAUSE_LIMIT_S)


_DEVICES = ("cpu", "cuda")
_ANYTHING = ("Any", "typing.Any", "object")
_CATCHABLE = frozenset(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}


def _with_caller(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], caller: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``fn`` with ``caller``, if omitted or None.

    Its parameter is the first annotated ``HPCallWrapper`` or similar, or named ``caller`` without another
    annotation.
    """
    try:
        signature = inspect.signature(fn)
    except ValueError:  # fn is a built-in
        return args, kwargs
    name = next((each.name for each in signature.parameters.values() if _wants_caller(each)), None)
    if name is None:
        return args, kwargs
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError:  # fn itself reports what is wrong
        return args, kwargs
    if bound.arguments.get(name) is None:
        bound.arguments[name] = caller
    return bound.args, bound.kwargs


def _wants_caller(parameter: inspect.Parameter) -> bool:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return False
    annotation = parameter.annotation
    if "HPCallWrapper" in str(annotation):
        return True
    anything = annotation is inspect.Parameter.empty or annotation in (Any, object) or annotation in _ANYTHING
    return parameter.name == "caller" and anything


def _numpy_random() -> Any:
    return sys.modules.get("numpy.random")


class _Entry:
    """The random streams, torch's modes and global hooks, and working directory, at a first entry of the block."""

    def __init__(self) -> None:
        numpy = _numpy_random()
        self._streams = random.getstate(), torch.get_rng_state()
        self._numpy = numpy.get_state(legacy=False) if numpy is not None else None
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._dtype = torch.get_default_dtype()
        self._grad = torch.is_grad_enabled()
        self._autocast = [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in _DEVICES]
        self._hooks = [(registry, dict(registry)) for registry in _hook_registries()]
        try:
            self._folder: str | None = os.getcwd()
        except FileNotFoundError:
            self._folder = None

    def restore_streams(self) -> None:
        """Restore the streams. CUDA that was not in use at the entry is seeded as torch does at its first use."""
        python, cpu = self._streams
        random.setstate(python)
        torch.set_rng_state(cpu)
        if self._numpy is not None:
            _numpy_random().set_state(self._numpy)
        if torch.cuda.is_initialized():
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda)
            else:
                torch.cuda.manual_seed(torch.initial_seed())

    def restore(self) -> None:
        self.restore_streams()
        if self._folder is not None:
            os.chdir(self._folder)
        torch.set_default_dtype(self._dtype)
        torch.set_grad_enabled(self._grad)
        for device, (is_on, dtype) in zip(_DEVICES, self._autocast):
            torch.set_autocast_enabled(device, is_on)
            torch.set_autocast_dtype(device, dtype)
        torch.clear_autocast_cache()
        for registry, before in self._hooks:
            registry.clear()
            registry.update(before)


def _hook_registries() -> Iterator[dict[int, Any]]:
    for module in (modules, optimizers):
        for name, value in vars(module).items():
            if name.startswith("_global_") and isinstance(value, dict):
                yield value


class _SignalHandlers:
    """The signal handlers at one point; empty outside the main thread, which alone can set them.

    An interruption may keep Lightning from restoring those before ``fit``: SIGTERM would call the old trainer's
    forever. Lightning also removes torch's SIGCHLD handler, set once to detect workers that die; torch sets it
    again.
    """

    def __init__(self) -> None:
        self._handlers: dict[signal.Signals, Any] = {}
        self._torch_listens = torch_workers._SIGCHLD_handler_set
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.getsignal(number) for number in _CATCHABLE}

    def restore(self) -> None:
        """Restore the handlers that have changed, but for one that C code installed."""
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        torch_workers._SIGCHLD_handler_set = self._torch_listens


@contextmanager
def _tracing(path: str | None, generation: int) -> Iterator[None]:
    if path is None:
        yield
        return
    from viztracer import VizTracer

    base = Path(path)
    name = f"{base.stem}-rank{os.environ.get(RANK_ENV, '0')}-generation{generation}{base.suffix or '.json'}"
    with VizTracer(output_file=str(base.with_name(name)), verbose=0):
        yield


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
        checkpoint_manager: _StateKeeper | None = None,
        check_memory_status: bool = True,
        restart: str = "in-process",
    ) -> None:
        if trace_file_path is not None and importlib.util.find_spec("viztracer") is None:
            raise ValueError("trace_file_path needs VizTracer: pip install viztracer")
        if restart not in _RESTARTS:
            raise ValueError(f"restart is {' or '.join(map(repr, _RESTARTS))}, and not {restart!r}")
        abort = abort or CheckpointlessAbortManager.get_default_checkpointless_abort()
        self.abort: Callable[[HPState], object] = _communicators_first(abort) if early_abort_communicator else abort
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
        self.restart = restart

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``fn``, or return it unchanged if the wrapper is disabled."""
        if not callable(fn):
            raise TypeError(f"HPWrapper wraps a function, not {type(fn).__name__}; its settings are given by name")
        if not self.enabled:
            return fn

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if _is_imported_by_child(fn) or _active is not None:  # a nested block is part of the outer one
                return fn(*args, **kwargs) if _active is not None else None
            call = HPCallWrapper(self)
            try:
                return call.run(fn, args, kwargs)
            finally:
                call.shutdown()

        return wrapped


class HPCallWrapper:
    """One call of a wrapped function, which runs the block again after every fault until it returns.

    Attributes:
        wrapper: the wrapper that holds the settings.
        parameter_update_lock: lock that brackets the optimizer update of this rank.
        checkpoint_manager: keeps the state across restarts (None until the strategy installs one).
        steps: where training stands: the step in progress, and the stages until the first one after a recovery.
        facts: what this rank's block recorded for later generations and for a successor of this process.
        blocks: where this is among the blocks of the script.
        board: this rank's board (None under another launcher).
        pace: measures what this rank does by itself in each step.
        restart_in_process: if False, this process is replaced after a fault instead of re-entering the block.
        faults: causes this generation's faults: the job's, or else a script's own (None: there are none).
        pause: the wait of all ranks at one step boundary, when a node is to be left.
    """

    def __init__(self, wrapper: HPWrapper) -> None:
        global _active
        self.wrapper = wrapper
        self.parameter_update_lock = ParameterUpdateLock()
        self.checkpoint_manager: _StateKeeper | None = wrapper.checkpoint_manager
        self.restart_in_process = True
        self.faults: FaultInjector | None = None
        self.board = Board.from_environment()
        self.facts = Facts(self.board)
        self.blocks = _Blocks(self.facts)
        self.client: RankClient = wrapper.hp_api_factory()
        self._now = Generation(own_generation())
        self.pause = _Pause(self._now, self.client)
        self.steps = StepTracker(self._now, self.board)
        self.pace = StepPace(self.board)
        self._succession = _Succession(self._now, self.client, self.steps, self.blocks, wrapper.restart)
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
        self._signal_handlers = _SignalHandlers()
        self._entry: _Entry | None = None
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
    def step_upon_restart(self) -> int:
        """The number of optimizer steps committed since the block was last entered."""
        return self.steps.since_entry

    def leave_if_over(self) -> None:
        """Leave the block, with ``RankShouldRestart``, if a fault of its generation is known.

        If this returns, the results of the collectives before it are right: a generation is known to be over before
        it is aborted, and one that was aborted returns on GPUs as if it had succeeded.
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
        self.client.send(Hello(self.generation))
        if self.blocks.obstacle:
            self.handle_fn_exception(UnrecoverableError(self.blocks.obstacle))
        self.initialize_barrier()
        while True:
            result, error = self.launch(fn, *args, **kwargs)
            is_over = self._responder.noticed >= self.generation
            if _is_return(error):
                self.steps.returned()
                self.client.send(Done(self.generation))
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
            self._succession.judge(error, fn, is_over)
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
                self.client.send(Barrier(self.generation, self._succession.unfit))
            go = self._succession.wait_go(after, self.checkpoint_manager)
        process_groups.release()
        os.environ.update(go.env)
        with self._responder.between_generations():
            self.pause.is_agreed = False
            self._now.adopt(go)
            self.steps.enter()
            if self.board is not None:
                self.board.set_generation(go.generation)
                self.pace.restart()
            self.parameter_update_lock.open()

    def launch(self, fn: Callable[..., _Result], *a: Any, **kw: Any) -> tuple[_Result | None, BaseException | None]:
        """Run the block once; return its value and None, or None and the exception that it raised."""
        if self._entry is None:
            self._entry = _Entry()
        else:
            self._entry.restore()
        self.beat()
        try:
            return self._main.run(lambda: self._block(fn, a, kw)), None
        except BaseException as error:  # noqa: BLE001 - the edge of the block: every end of it is handled by run()
            return None, error

    def _block(self, fn: Callable[..., _Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Result:
        self.leave_if_over()
        self.faults = FaultInjector.from_environment(own_rank())
        with _tracing(self.wrapper.trace_file_path, self.generation):
            args, kwargs = _with_caller(fn, args, kwargs, self)
            return fn(*args, **kwargs)

    def handle_fn_exception(self, call_ex: BaseException) -> None:
        """Report the block's exception to the agent, unless another rank's fault interrupted the block.

        It is raised itself if the job is ending, and ``SystemExit`` if the job cannot continue.
        """
        if self.client.is_ending:
            raise SystemExit(_GAVE_UP_EXIT_CODE) if isinstance(call_ex, RankShouldRestart) else call_ex
        if isinstance(call_ex, (UnrecoverableError, FaultSpecError)):  # a fault test that cannot run proves nothing
            reason, is_lost = exceptions.words_of(call_ex)[1], isinstance(call_ex, StateLostError)
            self.client.send(GiveUp(self.generation, reason, is_lost=is_lost))
            raise SystemExit(_GAVE_UP_EXIT_CODE) from call_ex
        if isinstance(call_ex, RankShouldRestart) and self.client.pending_fault(self.generation) is not None:
            return
        text = _traceback_of(without_own_frames(call_ex))
        keep_traceback(self.generation, own_rank(), text)
        name, message = exceptions.words_of(call_ex)
        cause = exception_cause(self.client.rank, name, message, text, self.steps.making, victim=is_victim(call_ex))
        self.client.send(FaultReport(self.generation, cause))

    def restart(self, term_ex: BaseException) -> None:
        """Abort, keep the state, clean up and check this process, so that it can re-enter the block.

        The frames of ``term_ex``, which ended the block, are cleared, because they hold the old state. A process
        that cannot continue asks to be replaced, and ends.
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
        """Clean up after the block, and check this process. A part that takes too long has the process replaced."""
        settings = self.wrapper
        abandoned.update(waited_for() - self._threads)
        with self._now.span(EventName.FINALIZE) as fields:
            with self._bounded("the abort"):
                getattr(settings.abort, "after_block", _nothing)(state)
            with self._bounded("the clean-up"):
                process_groups.hold()  # before any thread can wait in a group's destructor
                settings.finalize(*taken(settings.finalize, (state, term_ex)))
                CheckpointlessFinalizeCleanup()()  # whatever a finalize of the user's does
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
        """Report that optimizer step ``step`` begins; wait before it, if the ranks have agreed to do so."""
        if self.pause.is_agreed:
            self.pause.wait(self.beat, self.leave_if_over)
        self.steps.begin(step)
        self.pace.fetches()

    def committed(self, step: int) -> None:
        """Report that the rank's state is the state after ``step``."""
        self.steps.committed(step)

    def end_step(self) -> None:
        """Report that the optimizer step in progress is complete and committed."""
        self.steps.end()

    def enter_phase(self, phase: str, step: int, target: Callable[[], Any] | None = None) -> None:
        """Report ``phase`` of ``step``, as fault specs name it; ``target`` returns the tensor that it works on."""
        if phase != FaultPhase.BEFORE_OPTIMIZER.value:
            self.pace.enter(phase)
        if self.faults is not None:
            self.faults.at(FaultPhase(phase), step, self.generation, target)
        if phase == FaultPhase.BEFORE_OPTIMIZER.value:  # what is injected there is work of the step
            self.pace.enter(phase)

    # ---- the end

    def _end_job(self, leaving: SystemExit) -> NoReturn:
        at = f" in step {self.steps.making}" if self.steps.making >= 0 else ""
        reason = f"rank {os.environ.get(RANK_ENV, '0')} left the block{at} by sys.exit({leaving.code!r})"
        self.client.send(GiveUp(self.generation, reason, exit_code(leaving)))
        raise leaving


def _now() -> Generation:
    return _active._now if _active is not None else Generation(own_generation())


def span(stage: EventName, **fields: Any) -> AbstractContextManager[dict[str, Any]]:
    """Return a span of ``stage`` in the event log, with the generation and incident of the running block."""
    return _now().span(stage, **fields)


def emit_event(name: EventName, **fields: Any) -> None:
    """Write the event ``name`` to the log, with the generation and incident of the running block."""
    _now().emit(name, "point", **fields)


def not_exact(step: int, reason: str, **fields: Any) -> None:
    """Report that a repeated step is not the one that it was; ``UnrecoverableError`` if ``--strict``."""
    emit_event(EventName.INEXACT, step=step, reason=reason, **fields)
    call = active_call_wrapper()
    if call is not None:
        call.client.send(Inexact(call.generation, reason))
    if os.environ.get(STRICT_ENV) == YES:
        raise UnrecoverableError(f"rank {own_rank()}: {reason}: the job ends, as --strict ({STRICT_ENV}) asks for")


def putting_back() -> AbstractContextManager[None]:
    """Return a context in which a fault lets ``finally`` clauses run to their ends."""
    call = active_call_wrapper()
    return call._main.putting_back() if call is not None else nullcontext()


def _nothing(state: HPState) -> None:
    """Do nothing."""


def _communicators_first(abort: Callable[[HPState], object]) -> Callable[[HPState], object]:
    """Reorder a composition so that it aborts communicators first (``early_abort_communicator``)."""
    if not isinstance(abort, Compose):
        return abort
    first = [each for each in abort.instances if isinstance(each, HPAbortTorchDistributed)]
    rest = [each for each in abort.instances if not isinstance(each, HPAbortTorchDistributed)]
    return Compose(*rest, *first)


def _traceback_of(error: BaseException) -> str:
    """Return an exception's traceback with those of its causes; without them if they cannot be written."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - whatever a script's exception raises when it is asked for its notes and parts
        return "".join([*traceback.format_tb(error.__traceback__), line_of(error)])


def _is_return(error: BaseException | None) -> bool:
    """Return whether the block ended normally: not by a subclass of ``SystemExit``, as Lightning's for SIGTERM."""
    return error is None or (type(error) is SystemExit and exit_code(error) == 0)
