"""Run without knowing of the agent; ``RANK:WHAT`` arguments say how the ranks end."""

import os
import signal
import sys
import time

RANK = int(os.environ["RANK"])
print(f"rank {RANK} of {os.environ['WORLD_SIZE']} begins")
ENDS = dict(argument.split(":") for argument in sys.argv[1:])
what = ENDS.get(str(RANK), ENDS.get("*", "0"))
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    what = "wait"
if what == "wait":
    print("waiting")
    for _ in range(600):
        time.sleep(0.1)  # Python handles a signal that comes just before a sleep after it
if what == "raise":
    raise ValueError("a bug of the user's own")
if what.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, what))
time.sleep(0.2 if what == "late" else 0)
sys.exit(0 if what == "late" else int(what))
