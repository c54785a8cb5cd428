"""Loop until a signal comes; arguments: its name, the ranks that handle it, and how long saving takes."""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

from checkpointless.inprocess import HPCallWrapper, HPWrapper

OUT, RANK = Path(os.environ["CHECKPOINTLESS_RUN_DIR"]), os.environ["RANK"]
NAME, HANDLED_BY, SAVING = sys.argv[1], sys.argv[2].split(","), sys.argv[3]
came: list[int] = []


def leave(what: str) -> None:
    (OUT / f"{what}-{RANK}").touch()


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    step = 0
    try:
        while not came and not (OUT / "stop").exists():
            step += 1
            caller.begin_step(step)
            time.sleep(0.01)
            caller.end_step()
            leave("began")
    except KeyboardInterrupt:
        leave("interrupted")
        raise
    leave("saving")
    until_s = time.monotonic() + (60 if SAVING == "gate" else float(SAVING))
    while time.monotonic() < until_s and not (OUT / "gate").exists():
        time.sleep(0.01)
    leave("saved")


atexit.register(leave, "atexit")
if RANK in HANDLED_BY:
    signal.signal(getattr(signal, NAME), lambda number, _: came.append(number))
main()
leave("after")
