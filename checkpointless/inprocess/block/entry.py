"""What a block is entered with: the running wrapper, and a process that is as it was at the first entry."""

from __future__ import annotations

import importlib.util
import inspect
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.data._utils import signal_handling as torch_workers

from checkpointless.system.environment import RANK_ENV

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
    """The signal handlers of this process at one moment; empty outside the main thread, which alone can set them.

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
