"""Counts a recipe's parameters in a separate process, which imports NeMo and can build the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from checkpointless.environment import CPU_ENV
from checkpointless.layout import Layout
from checkpointless.recipes.memory import Count, Stage
from checkpointless.recipes.settings import RecipeError

_LIMIT_S = 300.0
_NOT_COUNTED = 3  # exit status of `checkpointless.recipes.shapes` if it cannot build the model


def counted(recipe: str, overrides: Sequence[str], layout: Layout) -> list[Stage] | str:
    """Return the parameters on each GPU of every pipeline stage, or one line that says why they are not known.

    This takes as long as importing NeMo, 10 to 40 s, and one or a few seconds more.

    Args:
        recipe: the recipe, as for :func:`checkpointless.recipes.settings.load`.
        overrides: the overrides, as for :func:`checkpointless.recipes.settings.load`.
        layout: the layout of the job.

    Raises:
        RecipeError: the model cannot be laid out in this way.
    """
    environment = {
        **os.environ,
        CPU_ENV: "1",  # nothing is computed, so no GPU is touched
        "CUDA_VISIBLE_DEVICES": "",
    }
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "stages.json"
        command = [sys.executable, "-m", "checkpointless.recipes.shapes", str(answer)]
        command += [str(layout.nodes), str(layout.ranks_per_node), recipe, *overrides]
        try:
            ended = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return f"counting took longer than {_LIMIT_S:g} s"
        if ended.returncode == 0:
            return [_stage(stage) for stage in json.loads(answer.read_text())]
    last = (ended.stderr.strip().splitlines() or [f"it ended with status {ended.returncode}"])[-1]
    if ended.returncode == 2:
        raise RecipeError(last)
    return last


def _stage(stage: dict[str, dict[str, int]]) -> Stage:
    dense, expert, whole = stage["dense"], stage["expert"], stage["whole"]
    assert isinstance(whole, int)
    return Stage(dense=Count(**dense), expert=Count(**expert), whole=whole)
