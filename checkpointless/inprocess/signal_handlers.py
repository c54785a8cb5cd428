"""Signal handlers that a block leaves behind: held outside of Python's heap, they hold what they belong to."""

from __future__ import annotations

import signal
import threading
from typing import Any

from torch.utils.data._utils import signal_handling as torch_workers

_CATCHABLE = frozenset(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}


class SignalHandlers:
    """The handlers of this process at one moment; nothing outside the main thread, which alone can set them.

    Lightning sets handlers for the time of ``fit`` and takes them back when it is over. Where an interruption keeps
    it from doing so, the handler, a method of the old trainer, would stay for ever, and be called on SIGTERM.

    Torch sets one for SIGCHLD once per process, to hear of data-loader workers that die. Lightning takes that back,
    too, when ``fit`` is over; here torch is told, so that it sets it again.
    """

    def __init__(self) -> None:
        self._handlers: dict[signal.Signals, Any] = {}
        self._torch_listens = torch_workers._SIGCHLD_handler_set
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.getsignal(number) for number in _CATCHABLE}

    def restore(self) -> None:
        """Put those back that have been changed since. (One that C code installed cannot be, and is left.)"""
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        torch_workers._SIGCHLD_handler_set = self._torch_listens
