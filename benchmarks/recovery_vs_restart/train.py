"""One rank of the same job on either side: `train.py SIDE DIRECTORY STEPS [FAULT]`, on 4 CPU ranks.

SIDE is `checkpointless`, or `checkpoint`: NeMo's own `MegatronStrategy` with a checkpoint after every step on local
disk, from which it resumes. Everything is imported inside of functions: Megatron spawns a process for its first
checkpoint, and that imports this file again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Marks

RECIPE = "tiny_gpt_cpu"


def config(side: str, directory: Path, steps: int) -> Any:
    """The recipe: the same for both, but for what makes a side."""
    from checkpointless.recipes.settings import load

    overrides = [f"trainer.max_steps={steps}"]
    if side == "checkpoint":
        checkpoint = (
            "{_target_: nemo.lightning.pytorch.callbacks.ModelCheckpoint, every_n_train_steps: 1, save_last: true, "
            "save_top_k: 0, monitor: null, filename: 'step={step}', auto_insert_metric_name: false, "
            "always_save_context: false, save_context_on_train_end: false, save_optim_on_train_end: true}"
        )
        overrides += [
            "checkpointless.enabled=false",
            "trainer.enable_checkpointing=true",
            f"log={{_target_: nemo.lightning.NeMoLogger, log_dir: '{directory}', name: nemo, "
            f"use_datetime_version: false, update_logger_directory: false, ckpt: {checkpoint}}}",
            "resume={_target_: nemo.lightning.AutoResume, resume_if_exists: true, "
            "resume_ignore_no_checkpoint: true}",
        ]
    return load(RECIPE, overrides)


def fit(side: str, config: Any, directory: Path, marks: Marks, faults: list[str]) -> None:
    """Build everything and train; on the checkpointless side this is what is executed again after a fault."""
    from checkpointless.integrations.megatron import cpu_platform
    from checkpointless.recipes import runner

    runner.prepare_process()
    job = runner.build(config)
    cpu_platform.install()  # now that NeMo is imported: what it needs to load a checkpoint

    from benchmarks.recovery_vs_restart.watch import callbacks

    if side == "checkpoint":
        from nemo.lightning.callback_group import CallbackGroup

        # As `nemo.collections.llm.train` does: without it NeMo cannot save.
        CallbackGroup.get_instance().update_config(nemo_version="v2", trainer=job.trainer, data=job.data)
    present: Any = job.trainer.callbacks
    present[:0] = callbacks(faults, directory, marks)
    if job.log is not None:
        job.log.setup(job.trainer, resume_if_exists=True)
    if job.resume is not None:
        job.resume.setup(job.trainer, job.model)
    job.optim.connect(job.model)
    job.trainer.fit(job.model, job.data)


def main() -> None:
    """Train one side."""
    side, name, steps, *faults = sys.argv[1:]
    directory = Path(name)
    marks = Marks(directory, int(os.environ["RANK"]))
    block = fit
    if side == "checkpointless":
        from checkpointless.inprocess import HPWrapper

        block = HPWrapper()(fit)
    block(side, config(side, directory, int(steps)), directory, marks, faults)


if __name__ == "__main__":
    main()
