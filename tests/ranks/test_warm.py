"""Test that ranks which live through a fault keep their model built, and that nothing is any different for it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from checkpointless.observability.report.verify import Steps
from checkpointless.observability.telemetry.event_names import EventName
from tests.ranks.jobs import Attempt, Disturb, Job
from tests.ranks.layouts import DROPOUT, EP2, PP2

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

TIED = ("model.config.share_embeddings_and_output_weights=true",)
TP2 = ("strategy.tensor_model_parallel_size=2",)
VPP = (*PP2, "strategy.virtual_pipeline_model_parallel_size=2", "model.config.num_layers=4")
# Most of a step's time goes into the layers and collectives of each microbatch: make a fourth of them.
SMALL = ("data.micro_batch_size=4", "model.config.num_layers=2")
BF16 = (
    "trainer.plugins={_target_: nemo.lightning.MegatronMixedPrecision, precision: bf16-mixed}",
    "model.config.pipeline_dtype={_target_: hydra.utils.get_object, path: torch.bfloat16}",
    "strategy.pipeline_dtype={_target_: hydra.utils.get_object, path: torch.bfloat16}",
    "optim.config.bf16=true",
)
HOOKS = "callbacks.hooks={_target_: tests.ranks.warm_checks.HookedModel}"
OVERLAP = ("strategy.ddp.overlap_grad_reduce=true", "strategy.ddp.overlap_param_gather=true")


def told(job: Job) -> list[Mapping[str, Any]]:
    return [event.fields for event in job.events(EventName.WARM) if "kept" in event.fields]


ONCE = "callbacks.once={_target_: tests.ranks.warm_checks.NoSecondModel}"


def watched(folder: Path) -> tuple[str, ...]:
    """Return callbacks that fail if a second model is built, and write down which old groups are alive."""
    return f"callbacks.checker={{_target_: tests.ranks.warm_checks.OldGroups, folder: '{folder / 'groups'}'}}", ONCE


def old_groups(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "groups" / f"rank-{rank}.jsonl").read_text().splitlines()]


def require_kept(job: Job, folder: Path) -> None:
    """Require that models stayed through three faults, the second of which replaced a rank; no old group did."""
    ranks = told(job)
    assert [each["kept"] for each in ranks] == [True] * 11, ranks  # 4 ranks, then 3, then 4
    for rank in range(4):
        assert all(each["old"] == [] for each in old_groups(folder, rank)), f"rank {rank}"


@pytest.mark.parametrize(
    "args",
    [
        pytest.param((*SMALL, *DROPOUT), marks=pytest.mark.long),  # bf16 has dropout on four replicas, too
        pytest.param((*TP2, *SMALL, *DROPOUT), marks=pytest.mark.long),  # test_worker_streams.py has such ranks
        pytest.param((*PP2, *SMALL), marks=pytest.mark.long),  # vpp-overlap has stages, too
        pytest.param((*EP2, *SMALL), marks=pytest.mark.long),
        (*BF16, *SMALL, *DROPOUT),
        pytest.param((*OVERLAP, *SMALL), marks=pytest.mark.long),
        pytest.param((*VPP, *DROPOUT), marks=pytest.mark.long),
        pytest.param((*VPP, *BF16, *DROPOUT), marks=pytest.mark.long),
        pytest.param((*VPP, *OVERLAP, *DROPOUT, "data.micro_batch_size=4"), marks=pytest.mark.long),
    ],
    ids=["dp4", "tp2", "pp2", "ep2", "bf16", "overlap", "vpp", "vpp-bf16", "vpp-overlap"],
)
def test_survivors_keep_their_model(disturb: Disturb, tmp_path: Path, args: tuple[str, ...]) -> None:
    """They do after an exception, a kill within an update that others have yet to make, and once more after it."""
    faults = (
        "exception@backward:rank=2,step=3",
        "sigkill@optimizer:rank=1,step=7",
        "exception@forward:rank=1,step=11",
    )
    job = disturb(4, 15, *faults, args=(*args, *watched(tmp_path)))
    require_kept(job, tmp_path)
    assert [each["everywhere"] for each in told(job)] == [True] * 4 + [False] * 3 + [True] * 4
    for rank in range(4):
        assert len({each["generation"] for each in old_groups(tmp_path, rank)}) >= (4 if rank != 1 else 2)


@pytest.mark.parametrize(
    "bf16", [pytest.param(False, id="fp32"), pytest.param(True, id="bf16", marks=pytest.mark.long)]
)
def test_a_model_that_a_callback_has_changed_is_built_anew(disturb: Disturb, bf16: bool) -> None:
    args = (*DROPOUT, HOOKS, *(BF16 if bf16 else ()))
    job = disturb(2, 5, "exception@backward:rank=1,step=3", args=args)
    ranks = told(job)
    assert [(each["kept"], "is not as it was built" in each["reason"]) for each in ranks] == [(False, True)] * 2, (
        ranks
    )


@pytest.mark.long  # test_megatron_loop.py has modules that a loop changes
@pytest.mark.parametrize(
    "kinds", [("exception", "sigkill"), ("sigkill", "exception")], ids=["exception-first", "sigkill-first"]
)
def test_what_a_hook_changes_of_modules_in_the_middle_belongs_to_the_state(
    disturb: Disturb, kinds: tuple[str, str]
) -> None:
    """Which modules train, and which parameters are trained: neither a survivor nor a new process would know."""
    changes = "callbacks.changes={_target_: tests.ranks.warm_checks.ChangesInTheMiddle}"
    faults = (f"{kinds[0]}@backward:rank=0,step=7", f"{kinds[1]}@optimizer:rank=1,step=8")
    job = disturb(2, 9, *faults, args=(*DROPOUT, changes))
    assert any("is not as it was built" in each.get("reason", "") for each in told(job)), told(job)


@pytest.mark.long
def test_a_model_that_is_built_anew_through_faults(disturb: Disturb) -> None:
    """A kill within an update, and a second fault before the model is built, and before it is restored."""
    faults = (
        "sigkill@optimizer:rank=1,step=3",
        "exception@forward:rank=0,step=6",
        "exception@init:rank=1,step=5",
        "exception@recovery:rank=2,step=5",
        "exception@optimizer:rank=3,step=8",
    )
    job = disturb(4, 10, *faults, args=(*BF16, *DROPOUT, HOOKS))
    assert not any(each["kept"] for each in told(job))


@pytest.mark.long
@pytest.mark.parametrize(
    ("made_by", "kind"), [("FirstWeights", "FirstWeights"), ("lambda_of_first_weights", "LambdaCallback")]
)
def test_a_callback_that_acts_before_the_restore_finds_a_new_model(
    disturb: Disturb, made_by: str, kind: str
) -> None:
    early = f"callbacks.early={{_target_: tests.ranks.warm_checks.{made_by}}}"
    job = disturb(2, 5, "exception@backward:rank=1,step=3", args=(*DROPOUT, early))
    assert [f"on_fit_start of {kind}" in each["reason"] for each in told(job)] == [True] * 2


@pytest.mark.long
@pytest.mark.parametrize("args", [(*PP2, *SMALL), (*VPP, *BF16)], ids=["pp2", "vpp-bf16"])
def test_stages_that_tie_their_embeddings_are_kept(disturb: Disturb, args: tuple[str, ...]) -> None:
    """A stage that is made anew exchanges weights with the other one, which is kept, while it builds: both ways."""
    faults = ("exception@forward:rank=3,step=3", "sigkill@forward:rank=0,step=5", "sigkill@optimizer:rank=3,step=7")
    job = disturb(4, 9, *faults, args=(*args, *TIED, ONCE))
    assert [each["kept"] for each in told(job)] == [True] * 10, told(job)


@pytest.mark.long
def test_an_update_that_is_made_again_without_main_parameters(disturb: Disturb) -> None:
    """In fp32 without the distributed optimizer, the held gradients are those of the parameters themselves."""
    plain = (
        "optim.config.use_distributed_optimizer=false",
        "strategy.ddp.use_distributed_optimizer=false",
        "strategy.num_distributed_optimizer_instances=1",
    )
    faults = ("sigkill@optimizer:rank=1,step=3", "sigkill@optimizer:rank=2,step=6")
    job = disturb(4, 8, *faults, args=(*plain, *DROPOUT))
    assert all(each["kept"] for each in told(job))


@pytest.mark.long
@pytest.mark.parametrize("more", [(), (*BF16, HOOKS)], ids=["kept", "built-anew"])
def test_a_start_from_scratch_does_not_begin_with_what_was_trained(
    attempt: Attempt, undisturbed: Callable[..., Steps], more: tuple[str, ...]
) -> None:
    args = ("trainer.max_steps=5", *DROPOUT, *more)
    calm = undisturbed(4, args)
    # Rank 2 dies before it can give what it holds.
    faults = ("sigkill@forward:rank=0,step=3", "sigkill@recovery:rank=2,step=2")
    scratch = (*args, "checkpointless.allow_restart_from_scratch=true")
    job = attempt(4, args=scratch, faults=faults)
    again = {record.step: record.loss for record in job.steps[1]}
    assert again == {record.step: record.loss for record in calm[1]}
    assert sum(record.step == 1 for record in job.steps[1]) == 2
