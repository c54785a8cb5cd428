"""Say what machine this is: ``python -m tests.gpu.machine FILE``, in a process that a lost GPU may hang."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRIVER = ("--query-gpu=driver_version", "--format=csv,noheader")


def machine() -> dict[str, str]:
    """Return the date, the commit, and the versions of what the results depend on, as text by name."""
    import torch

    from checkpointless.system import nccl

    found = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _said("git", "-C", str(ROOT), "describe", "--always", "--dirty") or "unknown",
        "kernel": platform.release(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA of torch": str(torch.version.cuda),
        "GPU": "none",
    }
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        found |= {
            "GPU": torch.cuda.get_device_name(0),
            "GPUs": str(torch.cuda.device_count()),
            "GPU memory": f"{memory / 2**30:.0f} GiB",
            "NCCL": ".".join(map(str, nccl.in_force())) or "none",
            "driver": (_said("nvidia-smi", *DRIVER).splitlines() or ["unknown"])[0],
        }
    return found


def _said(*command: str) -> str:
    """Return what a command says; nothing if it is not there, fails or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(machine(), indent=1) + "\n")
