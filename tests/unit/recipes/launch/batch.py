"""Run the batch script for Slurm with stand-ins for what Slurm brings."""

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.recipes.launch.manifests import SBATCH
from tests.unit.recipes.launch.pod import put


def sbatch_environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """Make stand-ins for what Slurm brings and return the environment; 3 nodes run here, the first of them last."""
    put(
        tmp_path / "bin",
        "scontrol",
        '#!/bin/bash\nif [ "$1" = show ]; then echo localhost; echo node-b; echo node-c; exit; fi\n'
        'echo "scontrol $*" >> "$FAKE_DIR/asked"\n',
    )
    put(tmp_path / "bin", "scancel", '#!/bin/bash\necho "scancel $*" >> "$FAKE_DIR/asked"\n')
    put(tmp_path / "bin", "getent", '#!/bin/bash\necho "${FAKE_ADDRESS:-10.0.0.1} STREAM $2"\n')
    put(
        tmp_path / "bin",
        "srun",
        '#!/bin/bash\necho "$@" > "$FAKE_DIR/srun"; echo -n "$CHECKPOINTLESS_TOKEN" > "$FAKE_DIR/token"\n'
        "while [[ $1 == --* ]]; do shift; done\n"
        'for node in 2 1 0; do SLURM_NODEID=$node "$@"; done\n'
        'until [ "$(wc -l < "$FAKE_DIR/coordinated")" -ge "${FAKE_COORDINATORS:-0}" ]; do sleep 0.1; done\n'
        'sleep "${FAKE_LONGER:-0}"\nexit 1\n',
    )
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "FAKE_DIR": str(tmp_path),
        "FAKE_COORDINATOR": "0",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_NODELIST": "node-[a-c]",
        "SLURM_JOB_NAME": "checkpointless",
        "SLURM_JOB_ID": "4711",
        "BATCH_LOST": "1",
        **more,
    }


def run_sbatch(tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    words = ["bash", str(SBATCH)]
    environment = sbatch_environment(tmp_path, **more)
    return subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)


def coordinated(tmp_path: Path) -> list[str]:
    """Return the command line of every coordinator that was started."""
    return (tmp_path / "coordinated").read_text().splitlines()
