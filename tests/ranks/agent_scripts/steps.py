"""Make ten steps; ``RANK:STEP:GENERATION:WHAT`` arguments say what goes wrong (``*`` for every generation).

``WHO:WHEN:WHAT`` arguments say what happens to ranks on their way to the barrier: WHEN is ``before`` or ``after``
(the rank has said that it is there); WHAT is a signal or ``sleep``; a ``+`` before WHO does it in every process of
that rank, not only in its first.
"""

import os
import signal
import sys
import threading
import time

from block import INCARNATION, OUT, RANK, connect, note, run_block

from checkpointless.launcher.protocol.messages import GiveUp, Replace

ARGUMENTS = [argument.split(":") for argument in sys.argv[1:]]
FAULTS = [each for each in ARGUMENTS if len(each) == 4]
MISHAPS = [each for each in ARGUMENTS if len(each) == 3]
NOT_COLLECTIVE = ("sleep", "wait", "gate", "stillborn")  # the others go on


def meet(ranks: list[int]) -> None:
    """Wait until all of these have come to their fault: none of them is to hear of another's before."""
    deadline = time.monotonic() + 20
    while not all((OUT / f"notes-{rank}.jsonl").exists() and '"fault"' in notes_of(rank) for rank in ranks):
        assert time.monotonic() < deadline, f"ranks {ranks} do not come to their faults"
        time.sleep(0.005)


def notes_of(rank: int) -> str:
    return (OUT / f"notes-{rank}.jsonl").read_text()


def wait_for_the_end_of(generation: int) -> None:
    client, board = connect()
    deadline = time.monotonic() + 60
    while client.pending_fault(generation) is None:
        assert time.monotonic() < deadline, f"generation {generation} does not end"
        board.beat()
        time.sleep(0.005)


def wait_for_the_test() -> None:
    """Wait until the test has made the file ``gate``."""
    _, board = connect()
    deadline = time.monotonic() + 60
    while not (OUT / "gate").exists():
        assert time.monotonic() < deadline, "the test does not open the gate"
        board.beat()
        time.sleep(0.005)


def is_ahead(when: str, generation: int) -> bool:
    return when == "*" or generation <= int(when)


def work(step: int, generation: int) -> None:
    here = [(int(rank), when, what) for rank, at, when, what in FAULTS if int(at) == step]
    fail(step, generation, [(when, what) for rank, when, what in here if rank == RANK])
    others = [when for rank, when, what in here if rank != RANK and what not in NOT_COLLECTIVE]
    if any(is_ahead(when, generation) for when in others):
        wait_for_the_end_of(generation)  # as in a collective: this step is not made without the rank that fails


def fail(step: int, generation: int, faults: list[tuple[str, str]]) -> None:
    for when, what in faults:
        if is_ahead(when, generation) and (what == "wait" or when not in ("*", str(generation))):
            wait_for_the_end_of(generation)  # or this rank would be done before its fault is due
        elif when in ("*", str(generation)) and what == "gate":
            wait_for_the_test()
        elif when in ("*", str(generation)):
            note("fault", what=what, generation=generation)
            meet([int(other) for other, *moment, _ in FAULTS if moment == [str(step), when]])
            if what == "raise":
                raise ValueError("the loss is not a number")
            if what == "sleep":
                time.sleep(60)
            if what.isdigit():
                sys.exit(int(what))
            client, _ = connect()
            if what == "replace":
                client.send(Replace(generation, "worn out"))
                os._exit(0)
            if what == "giveup":
                client.send(GiveUp(generation, "nobody holds shard 3"))
                time.sleep(60)
            os.kill(os.getpid(), getattr(signal, what))


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
if INCARNATION > 0 and any(what == "stillborn" for *_, what in FAULTS):
    sys.exit(7)
print(f"incarnation {INCARNATION} begins")
run_block(int(os.environ.get("STEPS", "10")), work, cleanup=cleanup)
print("done")
