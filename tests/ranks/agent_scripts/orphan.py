"""Leave processes behind, one of them in a session of its own, and say their ids; ``wait`` says to stay, too."""

import subprocess
import sys
import time

left = [subprocess.Popen(["sleep", "300"], start_new_session=own) for own in (False, True)]
print(*(each.pid for each in left), "started", flush=True)
if "wait" in sys.argv:
    time.sleep(300)
