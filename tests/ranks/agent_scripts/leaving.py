"""Rank 0 raises in step 3; ``WHO:WHEN:WHAT`` arguments say what happens to others on their way to the barrier.

WHEN is ``before`` or ``after`` (the rank has said that it is there); WHAT is a signal or ``sleep``; a ``+`` in
front of WHO does it in every process of that rank, not only in its first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from block import INCARNATION, RANK, note, run_block

MISHAPS = [argument.split(":") for argument in sys.argv[1:]]


def work(step: int, generation: int) -> None:
    if (RANK, step, generation) == (0, 3, 0):
        raise ValueError("rank 0 leaves first")


def suffer(what: str) -> None:
    note("suffers", what=what)
    if what == "sleep":
        time.sleep(60)
    else:
        os.kill(os.getpid(), getattr(signal, what))


def cleanup() -> None:
    for who, when, what in MISHAPS:
        if int(who) == RANK and INCARNATION == 0:
            if when == "before":
                suffer(what)
            else:
                threading.Timer(0.05, suffer, [what]).start()


if INCARNATION > 0 and f"+{RANK}" in (who for who, *_ in MISHAPS):
    time.sleep(60)
run_block(6, work, cleanup=cleanup)
