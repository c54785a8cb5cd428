"""Run a recipe with NeMo-Run's local executor, which uses torchrun: ``DIR NPROC STEPS KEY=VALUE...``."""

import runpy
import sys
from pathlib import Path

import nemo_run as run
from nemo.collections import llm

from checkpointless.strategies import enable

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "nemo_run_recipe.py"


def main() -> None:
    folder, nproc, steps, *environment = sys.argv[1:]
    recipe = llm.llama3_8b.pretrain_recipe(name="job", dir=folder, num_nodes=1, num_gpus_per_node=int(nproc))
    enable(recipe)
    recipe.trainer.max_steps = int(steps)
    runpy.run_path(str(EXAMPLE))["shrink"](recipe)
    executor = run.LocalExecutor(
        ntasks_per_node=int(nproc),
        launcher="torchrun",
        env_vars=dict(setting.split("=", 1) for setting in environment),
    )
    run.run(recipe, executor=executor, name="job", tail_logs=True)


if __name__ == "__main__":
    main()
