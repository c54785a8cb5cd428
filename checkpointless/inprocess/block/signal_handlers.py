"""Signal handlers that a block leaves behind; held outside Python's heap, they keep their owners alive."""

from __future__ import annotations

import signal
import threading
from typing import Any

from torch.utils.data._utils import signal_handling as torch_workers

_CATCHABLE = frozenset(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}


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
