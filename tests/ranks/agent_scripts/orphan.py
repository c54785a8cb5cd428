"""Leave a process behind and say its id."""

import subprocess

print(subprocess.Popen(["sleep", "60"]).pid)
