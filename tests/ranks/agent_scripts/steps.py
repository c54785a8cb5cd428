"""Ten steps; ``RANK:STEP:GENERATION:WHAT`` arguments say what goes wrong (``*`` for every generation)."""

from __future__ import annotations

import os
import signal
import sys
import time

from block import INCARNATION, RANK, connect, note, run_block

FAULTS = [argument.split(":") for argument in sys.argv[1:]]


def work(step: int, generation: int) -> None:
    for rank, at, when, what in FAULTS:
        if (int(rank), int(at)) == (RANK, step) and when in ("*", str(generation)):
            note("fault", what=what, generation=generation)
            if what == "raise":
                raise ValueError("the loss is not a number")
            if what == "sleep":
                time.sleep(60)
            if what.isdigit():
                sys.exit(int(what))
            client, _ = connect()
            if what == "replace":
                client.request_replacement(generation, "worn out")
                os._exit(0)
            if what == "giveup":
                client.give_up(generation, "nobody holds shard 3")
                time.sleep(60)
            os.kill(os.getpid(), getattr(signal, what))


if INCARNATION > 0 and any(what == "stillborn" for *_, what in FAULTS):
    sys.exit(7)
print(f"incarnation {INCARNATION} begins")
run_block(int(os.environ.get("STEPS", "10")), work)
print("done")
