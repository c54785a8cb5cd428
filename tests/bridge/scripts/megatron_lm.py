"""Trains as examples/train_megatron_lm.py does; with ``--few`` over 40 samples again and again.

``--break=WHERE:KIND:RANK:CALL`` breaks a rank once in a call of `evaluate` or `save_checkpoint`, counted from 1.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import wraps
from pathlib import Path
from typing import Any

from examples import train_megatron_lm as example

# isort: split
from megatron.training import training


def few_samples(sizes: list[int], vp_stage: int | None = None) -> Any:
    return provider([40, *sizes[1:]])


def break_once(where: str, kind: str, rank: str, call: str) -> None:
    marker, calls = Path(os.environ["CHECKPOINTLESS_RUN_DIR"]) / "broken", list[str]()
    original = getattr(training, where)

    @wraps(original)
    def breaks(*args: Any, **kwargs: Any) -> Any:
        calls.append(where)
        if os.environ["RANK"] == rank and len(calls) == int(call) and not marker.exists():
            marker.touch()
            if kind == "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"broken in {where}")
        return original(*args, **kwargs)

    setattr(training, where, breaks)


sys.argv = [each.replace("RUN_DIR", os.environ["CHECKPOINTLESS_RUN_DIR"]) for each in sys.argv]
provider = example.datasets_provider
if "--few" in sys.argv:
    sys.argv.remove("--few")
    few_samples.is_distributed = True  # type: ignore[attr-defined]
    example.datasets_provider = few_samples
for argument in [each for each in sys.argv if each.startswith("--break=")]:
    sys.argv.remove(argument)
    break_once(*argument.partition("=")[2].split(":"))

if __name__ == "__main__":
    example.main()
