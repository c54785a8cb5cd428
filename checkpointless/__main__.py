"""``python -m checkpointless``."""

import sys

from checkpointless.cli import main

sys.exit(main())
