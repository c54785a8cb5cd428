"""Print, each rank as a ``RANK:WHAT`` argument says."""

import os
import subprocess
import sys
import time

RANK = os.environ["RANK"]
what = dict(argument.split(":") for argument in sys.argv[1:]).get(RANK, "nothing")
if what == "flood":
    for _ in range(120):
        os.write(1, (b"x" * 99 + b"\n") * 1000)
if what == "endless":
    for _ in range(120):
        os.write(1, b"." * 100_000)
if what == "slowly":
    for _ in range(40):
        print("z" * 12_000, flush=True)
        time.sleep(0.05)
if what == "leaves":
    print("why it ends")
    subprocess.Popen(["sh", "-c", "while :; do echo and so on; sleep 0.5; done"], start_new_session=True)
    time.sleep(0.2)
    sys.exit(3)
print(f"\nrank {RANK} is done")
