"""Test the ways in which a user's run goes on: Megatron's options, NeMo's data modules, loggers and callbacks.

Each job runs undisturbed, and with an exception in a backward pass and the death of a process in an optimizer step.
"""

from pathlib import Path

import pytest

from checkpointless.faults.spec import FaultKind, parse
from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.telemetry.event_names import EventName
from tests.ranks.jobs import Disturb, Job
from tests.ranks.layouts import DROPOUT, EP2, TP2
from tests.ranks.nemo_zygote import Zygote
from tests.ranks.test_warm import OVERLAP, VPP, told

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(420)]

STEPS = 6
FAULTS = ("exception@backward:rank=0,step=3", "sigkill@optimizer:rank=1,step=5")
WAYS = "tests.ranks.users_ways"
SMALL = ("model.config.num_layers=2", *DROPOUT)
BATCH = "seq_length: 64, micro_batch_size: 2, global_batch_size: 16"
BYTES = "tokenizer: {_target_: checkpointless.testing.demo.text.ByteTokenizer}"
HERE = "num_workers: 0, pin_memory: false"
NEMO = "nemo.lightning.pytorch.callbacks"
GROUPED = f"{WAYS}.layers.grouped_layers"


def through_faults(
    disturb: Disturb, *args: str, faults: tuple[str, ...] = FAULTS, limit_s: float = 200.0, nproc: int = 4
) -> Job:
    job = disturb(nproc, STEPS, *faults, args=(*SMALL, *args), limit_s=limit_s)
    assert [incident.outcome for incident in job.incidents] == [Outcome.RESUMED] * len(faults), job.story()
    specs = [parse(fault) for fault in faults]
    killed = [(spec.rank,) if spec.kind is FaultKind.SIGKILL else () for spec in specs]
    assert [incident.respawned for incident in job.incidents] == killed
    return job


# --- Megatron's options -------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "args",
    [
        (*VPP, "data.micro_batch_size=1"),
        (
            *EP2,
            "model.config.moe_grouped_gemm=true",
            "model.config.moe_token_dispatcher_type=alltoall",
            f"model.config.transformer_layer_spec={{_target_: hydra.utils.get_method, path: {GROUPED}}}",
            f"callbacks.drop={{_target_: {NEMO}.moe_token_drop.MegatronTokenDropCallback}}",
        ),
        ("strategy.ddp.overlap_grad_reduce=true", "data.micro_batch_size=1", "data.global_batch_size=32"),
    ],
    ids=["virtual-pipeline", "grouped-experts-tokens-dropped", "overlap-accumulate"],
)
def test_megatrons_options(disturb: Disturb, args: tuple[str, ...]) -> None:
    job = through_faults(disturb, *args)
    assert [each["kept"] for each in told(job)] == [True] * 7, told(job)  # of 4 ranks, then of 3


@pytest.mark.long
def test_a_step_that_only_some_ranks_have_recorded_before_a_fault(disturb: Disturb) -> None:
    """What is recorded is gathered by all ranks: also by those that have recorded the step already."""
    slow = "callbacks.slow={_target_: tests.ranks.job_callbacks.SlowToRecord, rank: 1, step: 2, seconds: 3}"
    through_faults(disturb, slow, *OVERLAP, faults=("exception@forward:rank=0,step=3",), nproc=2)


# --- FP8 ---------------------------------------------------------------------------------------------------------

FP8 = (
    "trainer.plugins={_target_: nemo.lightning.MegatronMixedPrecision, precision: bf16-mixed, fp8: hybrid}",
    f"model.config.transformer_layer_spec={{_target_: hydra.utils.get_method, path: {WAYS}.scaled.scaled_layers}}",
)


@pytest.mark.long
@pytest.mark.parametrize("layout", [(), TP2], ids=["dp4", "tp2"])
def test_scales_that_follow_from_earlier_steps(disturb: Disturb, layout: tuple[str, ...]) -> None:
    validates = ("trainer.val_check_interval=2", "trainer.limit_val_batches=1")
    faults = ("sigkill@backward:rank=0,step=2", "exception@backward:rank=2,step=3", FAULTS[1])
    job = through_faults(disturb, *FP8, *layout, *validates, faults=faults)
    assert not any(each["kept"] for each in told(job)), "scales belong to a step"


@pytest.mark.long  # unit/megatron/test_scales.py has scales
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_parameters_in_fp8(disturb: Disturb, recipe: str) -> None:
    """They are quantised by a collective, for which no rank may wait behind the lock of an update.

    In step 4 a rank of each optimizer instance dies there: the other rank of each holds the last copy of its shard.
    """
    plugin, layer = FP8[0].replace("hybrid", f"hybrid, fp8_recipe: {recipe}, fp8_param_gather: true"), FP8[1]
    layer = layer.replace("scaled.scaled_layers", "quantised.quantised_layers")
    last_holders = ("sigkill@optimizer:rank=1,step=4", "sigkill@optimizer:rank=2,step=4")
    faults = ("sigkill@backward:rank=0,step=1", *last_holders, "exception@forward:rank=3,step=6")
    job = disturb(4, STEPS, *faults, args=(*SMALL, plugin, layer), limit_s=200.0)
    # Who is left makes step 4 if it has the gradients before the kills break its connections.
    targets = [incident.target for incident in job.incidents]
    assert (targets[0], {*targets[1:-1]} <= {3, 4, None}, targets[-1]) == (0, True, 5)
    assert sorted(rank for incident in job.incidents for rank in incident.respawned) == [0, 1, 2]
    assert not any(each["kept"] for each in told(job))


# --- data ---------------------------------------------------------------------------------------------------------

VALIDATES = ("trainer.val_check_interval=2", "trainer.limit_val_batches=2")
MOCK = f"_target_: {WAYS}.data.Mock, {HERE}, {BYTES}, num_train_samples: 2000"


def data(kind: str, more: str = BATCH) -> str:
    return f"data={{{kind}, {more}}}"


@pytest.fixture(scope="module")
def written(nemo_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write data of all kinds into a folder, and return it."""
    folder = tmp_path_factory.mktemp("data")
    nemo_zygote.run(1, f"{WAYS}.data:write", {"folder": str(folder)})
    return folder


def test_nemos_pretraining_data_with_validation_between_steps(disturb: Disturb, written: Path) -> None:
    kind = f"_target_: nemo.collections.llm.PreTrainingDataModule, paths: {written}/english, {HERE}, {BYTES}"
    args = (data(f"{kind}, index_mapping_dir: {written}/mapping"), "trainer.val_check_interval=2")
    last = f"sigkill@after_optimizer:rank=0,step={STEPS}"
    job = disturb(2, STEPS, *FAULTS, last, args=(*SMALL, *args, "trainer.limit_val_batches=1"), limit_s=200.0)
    first, second, last_target = (incident.target for incident in job.incidents)
    assert (first, second in (4, 5), last_target) == (2, True, STEPS)  # who is left may have made step 5
    cached = [event.fields for event in job.events(EventName.DATASETS)]
    assert [each["kept"] for each in cached] == [True] * 2 + [False] * 4, cached  # a new rank's are built by all


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        # Whole batches are dealt out, padded to the longest of their samples.
        pytest.param(f"Conversations, {HERE}, dataset_root: FOLDER/conversations", (), id="fine-tuning"),
        pytest.param("CyclicText, num_train_samples: 56", (), id="cyclic-through-an-uneven-end-of-a-pass"),
        pytest.param("IterableText", (), id="iterable-that-says-where-it-stands"),
        pytest.param("TwoValidations", VALIDATES, id="a-part-of-each-of-two-validation-sets"),
    ],
)
def test_a_data_module(disturb: Disturb, written: Path, kind: str, more: tuple[str, ...]) -> None:
    kind = kind.replace("FOLDER", str(written))
    through_faults(disturb, data(f"_target_: {WAYS}.data.{kind}"), *more, nproc=2)


@pytest.mark.long
def test_a_batch_size_that_is_ramped_up(disturb: Disturb) -> None:
    """NeMo ends the loop when the size has changed, here after five steps."""
    ramp = "seq_length: 64, micro_batch_size: 2, global_batch_size: 32, rampup_batch_size: [8, 8, 64]"
    disturb(2, 5, "exception@backward:rank=1,step=3", args=(*SMALL, data(MOCK, ramp), "trainer.max_steps=8"))


@pytest.mark.long
def test_a_fault_after_the_last_step_on_data_that_just_suffices(disturb: Disturb) -> None:
    just = MOCK.replace("2000", str(STEPS * 16))
    through_faults(disturb, data(just), faults=(f"sigkill@after_optimizer:rank=1,step={STEPS}",), nproc=2)


# --- callbacks and loggers ----------------------------------------------------------------------------------------


def callbacks(**targets: str) -> list[str]:
    return [f"callbacks.{name}={{_target_: {target}}}" for name, target in targets.items()]


def test_callbacks_and_a_logger_that_users_take(disturb: Disturb, tmp_path: Path) -> None:
    logger = f"trainer.logger={{_target_: lightning.pytorch.loggers.TensorBoardLogger, save_dir: {tmp_path}}}"
    through_faults(
        disturb,
        *VALIDATES,
        "trainer.max_time='00:01:00:00'",
        "trainer.enable_progress_bar=false",
        logger,
        *callbacks(
            timer="lightning.pytorch.callbacks.Timer, duration: '00:01:00:00'",
            rate="lightning.pytorch.callbacks.LearningRateMonitor",
            garbage=f"{NEMO}.GarbageCollectionCallback, gc_interval_train: 2, gc_interval_val: 2",
            preemption=f"{NEMO}.PreemptionCallback",
            nsys=f"{NEMO}.NsysCallback, start_step: 2, end_step: 4",
            timing="nemo.utils.exp_manager.TimingCallback",
            delta="nemo.utils.exp_manager.DeltaTimingCallback",
            speed=f"{NEMO}.SpeedMonitor, window_size: 2",
            optimizer=f"{NEMO}.OptimizerMonitor",
            parity=f"{NEMO}.DdpParityChecker, interval: 2",
            training=f"{NEMO}.ModelTrainingStateCallback",
            memory=f"{NEMO}.MemoryMonitor",
            frozen=f"{NEMO}.layer_freezer.LayerFreezer, schedule: {{decoder.layers.0: [1, 3]}}",
        ),
        nproc=2,
    )
