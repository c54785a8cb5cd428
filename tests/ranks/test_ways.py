"""The ways in which a user's run goes on: Megatron's options, NeMo's data modules, loggers and callbacks.

Each job runs undisturbed, and with an exception in a backward pass and the death of a process in an optimizer step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointless.telemetry.incidents import Outcome
from tests.ranks.jobs import Disturb, Job, run_job
from tests.ranks.layouts import DROPOUT, EP2
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(300)]

STEPS = 6
FAULTS = ("exception@backward:rank=2,step=3", "sigkill@optimizer:rank=1,step=5")
WAYS = "tests.ranks.users_ways"
SMALL = ("model.config.num_layers=2", *DROPOUT)
BATCH = "seq_length: 64, micro_batch_size: 2, global_batch_size: 16"
BYTES = "tokenizer: {_target_: checkpointless.demo.text.ByteTokenizer}"
HERE = "num_workers: 0, pin_memory: false"
NEMO = "nemo.lightning.pytorch.callbacks"
OWN_LAYERS = (
    f"model.config.transformer_layer_spec={{_target_: hydra.utils.get_method, path: {WAYS}.layers.{{name}}}}"
)


def through_faults(disturb: Disturb, *args: str, faults: tuple[str, ...] = FAULTS, limit_s: float = 140.0) -> Job:
    """Train on four ranks, through the faults, to the same bits; every fault is recovered from once."""
    job = disturb(4, STEPS, *faults, args=(*SMALL, *args), limit_s=limit_s)
    assert [incident.outcome for incident in job.incidents] == [Outcome.RESUMED] * len(faults)
    assert [incident.respawned for incident in job.incidents] == [
        (1,) if fault.startswith("sigkill") else () for fault in faults
    ]
    return job


# --- Megatron's options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        (
            "strategy.tensor_model_parallel_size=2",
            "strategy.context_parallel_size=2",
            "strategy.sequence_parallel=true",
            "data.micro_batch_size=4",
            OWN_LAYERS.format(name="parallel_layers"),
        ),
        (
            "strategy.pipeline_model_parallel_size=2",
            "strategy.virtual_pipeline_model_parallel_size=2",
            "model.config.num_layers=4",
            "data.micro_batch_size=1",
        ),
        (
            *EP2,
            "model.config.moe_grouped_gemm=true",
            "model.config.moe_token_dispatcher_type=alltoall",
            OWN_LAYERS.format(name="grouped_layers"),
            f"callbacks.drop={{_target_: {NEMO}.moe_token_drop.MegatronTokenDropCallback}}",
        ),
        ("strategy.ddp.overlap_grad_reduce=true", "data.micro_batch_size=1", "data.global_batch_size=32"),
    ],
    ids=[
        "sequence-and-context-parallel",
        "virtual-pipeline",
        "grouped-experts-tokens-dropped",
        "overlap-accumulate",
    ],
)
def test_megatrons_options(disturb: Disturb, args: tuple[str, ...]) -> None:
    through_faults(disturb, *args)


@pytest.mark.xfail(strict=True, reason="the recorder digests parameters that are not gathered yet")
def test_a_parameter_gather_that_overlaps_with_the_next_step(disturb: Disturb) -> None:
    through_faults(disturb, "strategy.ddp.overlap_grad_reduce=true", "strategy.ddp.overlap_param_gather=true")


# --- fp16 ---------------------------------------------------------------------------------------------------------

FP16 = (
    "trainer.plugins={_target_: nemo.lightning.MegatronMixedPrecision, precision: 16-mixed, "
    "fp16_initial_loss_scale: 67108864, fp16_loss_scale_window: 2, fp16_hysteresis: 1}",
    f"callbacks.scaled={{_target_: {WAYS}.scaler.ScaledLoss}}",
)


def _behind_scaler(name: str, **settings: object) -> str:
    given = ", ".join(f"{key}: {json.dumps(value)}" for key, value in settings.items())
    return f"callbacks.{name}={{_target_: {WAYS}.scaler.FaultBehindScaler, {given}}}"


def _overflows(job: Job) -> dict[int, bool]:
    """In which of the disturbed steps the gradients overflowed."""
    notes = sorted(job.run_dir.glob("scaler-*.json"))
    return {int(note.stem.partition("-")[2]): json.loads(note.read_text())["found_inf"] for note in notes}
