"""The signals that a job is sent from outside, and whether a process would die of one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: They end a job. torchrun (2.13) passes on the same ones.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: They are for the script's own handlers.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
#: Has a rank write its stacks. Programs use none of these two; ranks interrupt themselves with a higher one.
STACKS_SIGNAL = signal.SIGRTMIN + 1
CUT_SIGNAL = signal.SIGRTMIN + 2  # makes an agent drop its connection to the coordinator, as an injected fault
_MAY_BE_IGNORED = (signal.SIGHUP, *PASSED_ON)  # nohup; but shells ignore SIGINT and SIGQUIT for whatever has an "&"


@contextmanager
def handling(numbers: Iterable[int], note: Callable[[int], None]) -> Iterator[None]:
    """Pass the numbers of signals to ``note`` instead of dying of them; SIGHUP that is ignored stays ignored."""
    before = {}
    for number in numbers:
        if number in _MAY_BE_IGNORED and signal.getsignal(number) == signal.SIG_IGN:
            continue
        before[number] = signal.signal(number, lambda received, _: note(received))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def is_default(pid: int, number: int) -> bool:
    """Return whether a signal would have its default action in a process; False if that is not known."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = (line.split()[1] for line in status.splitlines() if line.startswith(("SigIgn:", "SigCgt:")))
    return not any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
