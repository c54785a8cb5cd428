"""Enters a block: with its caller, in a process as at the first entry, if this process can do so again."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.data._utils import signal_handling as torch_workers

from checkpointless.inprocess.exceptions import UnrecoverableError, is_victim, line_of
from checkpointless.inprocess.generation import Generation
from checkpointless.inprocess.step_tracker import StepTracker
from checkpointless.launcher.client import AgentClient, AgentLostError, RankClient, SuccessorWantedError
from checkpointless.launcher.protocol.board import Facts
from checkpointless.launcher.protocol.messages import Go
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.scribe import flush_all
from checkpointless.system.environment import RANK_ENV

logger = logging.getLogger(__name__)


class StateKeeper(Protocol):
    """Keeps the state of training from one run of the block to the next.

    :class:`checkpointless.recovery.CheckpointManager` is one. The engine itself knows nothing about the state.
    """

    def hold(self, error: BaseException | None = None) -> None:
        """Take hold of the state that the block leaves.

        It runs in the main thread after the abort, before the frames of the block are cleared and before anything
        is cleaned up.

        Args:
            error: the exception that ended the block.
        """

    def hand_over(self, high_water: int) -> tuple[int, str]:
        """Hand the state to a successor of this process, which ends.

        Args:
            high_water: the highest optimizer step that any rank was ever seen to commit (-1: none).

        Returns:
            How many bytes that took (0: there is no state yet), and why it could not be done ("": it was).
        """

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


def is_imported_by_child(fn: Callable[..., object]) -> bool:
    """Return whether the script of ``fn`` is being imported by a process that it started, and say so if it is.

    ``multiprocessing`` with "spawn" or "forkserver" imports the script in each new process, as ``__mp_main__``,
    before that process does its work (Megatron's writer of checkpoints, say). No block is entered there.
    """
    is_over = sys.modules["__main__"].__name__ == _IN_CHILD  # the import: then a block may be the child's work
    if is_over or getattr(fn, "__module__", "") != _IN_CHILD:
        return False
    logger.warning(
        "the wrapped function is not entered in a child process that imports the script: put the lines that call "
        'it under `if __name__ == "__main__":`, so that nothing of them runs there'
    )
    return True


class Blocks:
    """Where a rank's script stands among its blocks, when one of them is entered.

    Args:
        facts: what outlives this process.
    """

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
        """Note that this block trains. Called on every entry.

        Args:
            when_left: is called when all ranks have left the block. It should hold no state of the training.

        Raises:
            UnrecoverableError: another block has.
        """
        if self._facts.get(_TRAINED, self._number) != self._number:
            raise UnrecoverableError(_SECOND_TRAINING)
        self._facts.keep(_TRAINED, self._number)
        self._when_left = when_left

    def leave(self) -> None:
        """Note that all ranks have left this block."""
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


def restart_of(restart: str) -> str:
    """Return the way of restarting, if there is such a one.

    Raises:
        ValueError: there is none.
    """
    if restart not in _RESTARTS:
        raise ValueError(f"restart is {' or '.join(map(repr, _RESTARTS))}, and not {restart!r}")
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
        restart: the way of restarting, one of :data:`_RESTARTS`.

    Raises:
        ValueError: new processes are asked for under a launcher that starts none.

    Attributes:
        unfit: why this process cannot enter its block again, in one line ("": it can).
    """

    def __init__(
        self, generation: Generation, client: RankClient, steps: StepTracker, blocks: Blocks, restart: str
    ) -> None:
        self.unfit = ""
        if restart == "process" and isinstance(client, AgentClient):
            self.unfit = _ASKED_FOR
        elif restart == "process" and client.has_launcher:
            raise ValueError(_NO_SUCCESSORS)
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


_DEVICES = ("cpu", "cuda")
_ANYTHING = ("Any", "typing.Any", "object")
_CATCHABLE = frozenset(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}


def with_caller(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], caller: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``fn``, with ``caller`` filled in if its parameter was omitted or None.

    The parameter for ``caller`` is the first one that is annotated ``HPCallWrapper``, ``Optional[HPCallWrapper]``
    or similar, or that is named ``caller`` and has no annotation (or one that allows anything).
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


@dataclass(frozen=True)
class EntryStreams:
    """The states of this process's random streams at the first entry of the block.

    A process that re-enters its block has drawn from streams that were seeded before the block, at the top of the
    script; a new process, which has just run that part, has not. Both have to draw the same numbers in the block.

    Attributes:
        python: state of the ``random`` module.
        torch_cpu: state of torch's default CPU generator.
        numpy: state of NumPy's global generator; None if NumPy was not imported.
        cuda: state of the current device's generator; None if CUDA was not in use.
    """

    python: tuple[Any, ...]
    torch_cpu: torch.Tensor
    numpy: dict[str, Any] | None
    cuda: torch.Tensor | None

    @classmethod
    def capture(cls) -> EntryStreams:
        """Capture the current states."""
        numpy = _numpy_random()
        return cls(
            random.getstate(),
            torch.get_rng_state(),
            numpy.get_state(legacy=False) if numpy is not None else None,
            torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        )

    def restore(self) -> None:
        """Restore the captured states.

        If CUDA was not in use at the capture, it is seeded as torch would seed it at the first use.
        """
        random.setstate(self.python)
        torch.set_rng_state(self.torch_cpu)
        numpy = _numpy_random()
        if numpy is not None and self.numpy is not None:
            numpy.set_state(self.numpy)
        if torch.cuda.is_initialized():
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda)
            else:
                torch.cuda.manual_seed(torch.initial_seed())


def _numpy_random() -> Any:
    return sys.modules.get("numpy.random")


class EntryModes:
    """Torch's modes and global hooks, and the working directory, at the first entry of the block.

    A fault would leave what the block has changed in the processes that live on, and in no other: a default dtype
    that is changed for a while, a hook for all modules that the block registers again at each entry.
    """

    def __init__(self) -> None:
        self._dtype = torch.get_default_dtype()
        self._grad = torch.is_grad_enabled()
        self._autocast = [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in _DEVICES]
        self._hooks = [(registry, dict(registry)) for registry in _hook_registries()]
        try:
            self._folder: str | None = os.getcwd()
        except FileNotFoundError:
            self._folder = None

    def restore(self) -> None:
        """Restore them.

        Raises:
            OSError: the working directory cannot be entered any more.
        """
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
    """Yield where torch keeps the hooks for all modules and optimizers."""
    for module in (modules, optimizers):
        for name, value in vars(module).items():
            if name.startswith("_global_") and isinstance(value, dict):
                yield value


class SignalHandlers:
    """The signal handlers of this process at one point; empty outside the main thread, which alone can set them.

    Lightning sets handlers for the duration of ``fit`` and restores the earlier ones afterwards. If an interruption
    prevents that, the handler, a method of the old trainer, would stay forever and be called on SIGTERM.

    Torch sets a SIGCHLD handler once per process, to detect data-loader workers that die. Lightning removes that
    handler, too, when ``fit`` is over; this class lets torch know, so that torch sets it again.
    """

    def __init__(self) -> None:
        self._handlers: dict[signal.Signals, Any] = {}
        self._torch_listens = torch_workers._SIGCHLD_handler_set
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.getsignal(number) for number in _CATCHABLE}

    def restore(self) -> None:
        """Restore the handlers that have changed. (One that C code installed cannot be restored, and is left.)"""
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        torch_workers._SIGCHLD_handler_set = self._torch_listens


def require_tracer() -> None:
    """Check that viztracer is installed.

    Raises:
        ValueError: viztracer is not installed.
    """
    if importlib.util.find_spec("viztracer") is None:
        raise ValueError("trace_file_path needs VizTracer: pip install viztracer")


@contextmanager
def tracing(path: str | None, generation: int) -> Iterator[None]:
    """Trace the body into ``path``, with rank and generation before its suffix; trace nothing if it is None."""
    if path is None:
        yield
        return
    from viztracer import VizTracer

    base = Path(path)
    name = f"{base.stem}-rank{os.environ.get(RANK_ENV, '0')}-generation{generation}{base.suffix or '.json'}"
    with VizTracer(output_file=str(base.with_name(name)), verbose=0):
        yield
