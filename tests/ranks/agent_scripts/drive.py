"""Launch the job that the JSON argument describes, as the command line would."""

import json
import sys
from pathlib import Path

from checkpointless.agent.launch import LaunchConfig, launch

options = json.loads(sys.argv[1])
options["run_dir"] = Path(options["run_dir"])
options["script_args"] = tuple(options["script_args"])
sys.exit(launch(LaunchConfig(**options), lambda line: print(line, file=sys.stderr, flush=True)))
