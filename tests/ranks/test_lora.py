"""Compare the steps of NeMo's LoRA through faults with an undisturbed run, and check what is moved for it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.report.verify import Steps
from checkpointless.observability.telemetry.event_names import EventName
from tests.ranks.jobs import RUNNER, Attempt, Disturb, Job, Trainings, TrainingsOf, run_job, small
from tests.ranks.layouts import PP2, TP2, with_checkpoints
from tests.ranks.nemo_zygote import Zygote
from tests.ranks.test_warm import BF16, VPP, require_kept, told, watched

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

DROPOUT = ("model.config.hidden_dropout=0.1", "model.config.attention_dropout=0.1", "peft.dropout=0.1")


@pytest.fixture(scope="module")
def of_recipe(trainings_of: TrainingsOf) -> Trainings:
    return trainings_of(RUNNER, recipe="tiny_lora_cpu")


def moved(job: Job, rank: int) -> list[int]:
    ends = job.events(EventName.TRANSFER, "end", rank)
    return [int(event.fields["bytes"]) for event in ends if "bytes" in event.fields]


def test_it_trains(of_recipe: Trainings) -> None:
    job = of_recipe.calm(4, *small(4, 5))
    assert "Adding lora to" in job.log(0), "else it is the whole model that is trained"
    losses = [float.fromhex(record.loss) for record in job.steps[0]]
    assert losses[-1] < losses[0]


def test_a_new_process_is_given_the_base_model_once(disturb: Disturb) -> None:
    job = disturb(4, 5, "sigkill@forward:rank=1,step=2", "exception@optimizer:rank=1,step=4")
    assert [incident.outcome for incident in job.incidents] == [Outcome.RESUMED, Outcome.RESUMED]
    everything, adapters = moved(job, 1)
    assert everything > 4 * adapters, "its process lived through the second fault, and the base model is larger"
    if job.incidents[1].target == 4:  # on a busy machine the others may hear of it before their updates
        assert adapters > 0, "its update failed"
    for rank in (0, 2, 3):
        assert moved(job, rank) == [0, 0]


@pytest.mark.long
def test_what_arrived_is_kept_when_the_rest_of_a_recovery_fails(disturb: Disturb) -> None:
    job = disturb(4, 5, "sigkill@between:rank=1,step=2", "exception@transfer:rank=3,step=2")
    assert len(job.incidents) == 2
    assert job.incidents[-1].target == 2
    filled = [event for event in job.events(EventName.TRANSFER, rank=1) if event.fields.get("sources")]
    assert int(filled[-1].fields["kept"]) > 0, "it came in the recovery before"


@pytest.mark.long
def test_checksums_and_offload(disturb: Disturb) -> None:
    args = ("checkpointless.enable_checksum=true", "checkpointless.enable_offload=true")
    job = disturb(4, 5, "sigkill@backward:rank=2,step=2", "exception@optimizer:rank=0,step=4", args=args)
    assert 4 * moved(job, 0)[-1] < moved(job, 2)[0], "the base model is compared, and not sent again"


@pytest.fixture(scope="module")
def pretrained(nemo_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return NeMo's checkpoint of the model without adapters, after 3 steps."""
    folder = tmp_path_factory.mktemp("pretrained")
    args = (*small(4, 3), *with_checkpoints(folder / "nemo"))
    run_job(nemo_zygote, folder / "run", 4, args=args)
    (checkpoint,) = (folder / "nemo").rglob("*-last")
    return checkpoint


def resume(restore: Path | None = None, **more: Any) -> str:
    """Return an override for NeMo's auto-resume, with the weights of ``restore`` where it finds nothing newer."""
    fields = {"_target_": "nemo.lightning.AutoResume", **more}
    if restore is not None:
        fields["restore_config"] = {"_target_": "nemo.lightning.RestoreConfig", "path": str(restore)}
    return f"resume={json.dumps(fields)}"


@pytest.mark.long
def test_pretrained_weights_are_read_at_the_first_start_only(
    disturb: Disturb, undisturbed: Callable[..., Steps], pretrained: Path
) -> None:
    args = (resume(pretrained),)
    job = disturb(4, 7, "sigkill@forward:rank=1,step=2", "exception@between:rank=0,step=3", args=args)
    for rank in range(4):
        assert job.log(rank).count("Doing selective restore") == 1
    started = float.fromhex(job.steps[0][0].loss)
    assert started < float.fromhex(undisturbed(4, small(4, 5))[0][0].loss)


@pytest.mark.long
def test_both_holders_gone_falls_back_to_base_and_adapter_checkpoints(
    attempt: Attempt, undisturbed: Callable[..., Steps], pretrained: Path, tmp_path: Path
) -> None:
    # Rank 2 dies before it can give what it holds.
    faults = ("sigkill@forward:rank=0,step=5", "sigkill@recovery:rank=2,step=4")
    args = (
        *small(4, 7),
        *with_checkpoints(tmp_path / "nemo"),
        resume(pretrained, resume_if_exists=True, resume_ignore_no_checkpoint=True),
    )
    job = attempt(4, recipe="tiny_lora_cpu", args=args, faults=faults)
    # It went on from the checkpoint after step 3.
    job.assert_done_again(undisturbed(4, (*small(4, 7), resume(pretrained))), again={4})


@pytest.mark.long
@pytest.mark.parametrize(
    "args",
    [
        pytest.param(DROPOUT, id="dp4"),
        pytest.param((*TP2, *DROPOUT), id="tp2"),
        pytest.param((*PP2, *DROPOUT), id="pp2"),
        pytest.param((*VPP, *DROPOUT), id="vpp"),
        pytest.param((*BF16, *DROPOUT), id="bf16"),
    ],
)
def test_survivors_keep_base_model_and_adapters(disturb: Disturb, tmp_path: Path, args: tuple[str, ...]) -> None:
    faults = (
        "exception@backward:rank=2,step=3",
        "sigkill@optimizer:rank=1,step=6",
        "exception@forward:rank=1,step=9",
    )
    added = "callbacks.added={_target_: tests.ranks.warm_checks.AdaptersOnce}"
    job = disturb(4, 12, *faults, args=(*args, *watched(tmp_path), added))
    require_kept(job, tmp_path)


@pytest.mark.long
def test_adapters_of_another_kind_are_added_anew(disturb: Disturb) -> None:
    dora = "peft._target_=nemo.collections.llm.peft.DoRA"
    job = disturb(4, 4, "exception@backward:rank=2,step=3", args=(*DROPOUT, dora))
    assert [each["reason"] for each in told(job)] == ["it is not known how DoRA changes the model"] * 4
