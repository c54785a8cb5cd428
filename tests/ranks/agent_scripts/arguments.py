"""Prints its arguments as they are."""

import os
import sys

sys.stdout.buffer.write(b"arguments " + b" ".join(map(os.fsencode, sys.argv[1:])) + b"\n")
