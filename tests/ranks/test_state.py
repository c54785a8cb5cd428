"""Test state of every kind, and damage to it, in real NeMo jobs: precisions, optimizers, replicas, transfers."""

import pytest

from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.telemetry.event_names import EventName
from tests.ranks.jobs import Attempt, Disturb, Job, small
from tests.ranks.layouts import DROPOUT, EP2

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

BF16 = ("trainer.plugins={_target_: nemo.lightning.MegatronMixedPrecision, precision: bf16-mixed}",)
ONE_INSTANCE = (
    "optim.config.use_distributed_optimizer=false",
    "strategy.ddp.use_distributed_optimizer=false",
    "strategy.num_distributed_optimizer_instances=1",
)
THREE_HOLDERS = ("strategy.num_distributed_optimizer_instances=3", "data.global_batch_size=24")  # of 6 ranks
SMALL_BUCKETS = ("checkpointless.memory_budget_bytes=262144",)
LOST_BOARD = "callbacks.lost_board={{_target_: tests.ranks.job_callbacks.LostBoard, ranks: {ranks}, step: 4}}"
JUMP = ("checkpointless.rng_replication_jump=2",)
EP2_FOUR_HOLDERS = (*EP2, "strategy.num_distributed_optimizer_instances=4")  # of 8 ranks
CHECKSUM = ("checkpointless.enable_checksum=true",)
CHECKED, STEPS = (*THREE_HOLDERS, *SMALL_BUCKETS, *CHECKSUM), 8


@pytest.mark.long
@pytest.mark.parametrize(
    "args",
    [
        pytest.param(BF16, id="bf16-distributed"),
        pytest.param((*BF16, *ONE_INSTANCE), id="bf16-every-rank-whole"),
        pytest.param((*EP2, *DROPOUT), id="experts"),
        pytest.param((*BF16, *EP2), id="bf16-experts"),
    ],
)
def test_every_megatron_optimizer(disturb: Disturb, args: tuple[str, ...]) -> None:
    faults = [
        f"{kind}@{phase}:rank={rank},step={step}"
        for step, phase in ((2, "backward"), (6, "optimizer"), (10, "after_optimizer"))
        for kind, rank, step in (("sigkill", 1, step), ("exception", 2, step + 2))
    ]
    job = disturb(4, 14, *faults, args=args)
    assert [incident.outcome for incident in job.incidents] == [Outcome.RESUMED] * 6


def transfers(job: Job, rank: int) -> list[dict[str, object]]:
    """Return the fields of every transfer that filled ``rank``."""
    ends = job.events(EventName.TRANSFER, "end", rank)
    return [dict(event.fields) for event in ends if event.fields.get("sources")]


def test_a_source_killed_in_the_middle_of_a_transfer(disturb: Disturb) -> None:
    """The bit is mended before it spreads, as there are three replicas. A second fault comes without gradients."""
    faults = (
        *("sigkill@between:rank=0,step=2", "sigkill@transfer:rank=2,step=2"),
        *("bitflip@between:rank=1,step=4", "exception@before_optimizer:rank=0,step=5"),
        *("sigkill@before_optimizer:rank=4,step=7", "exception@transfer:rank=2,step=6"),
    )
    job = disturb(6, STEPS, *faults, args=CHECKED)
    killed, flipped, last = (job.incidents[place] for place in (1, 2, -1))
    assert (killed.outcome, killed.target) == (Outcome.RESUMED, 2)
    (fill,) = transfers(job, 1)
    assert fill["sources"] == [3, 5]
    assert (flipped.target, last.target) == (4, 6)


@pytest.mark.parametrize("args", [pytest.param((), id="dp4"), pytest.param(EP2, id="ep2", marks=pytest.mark.long)])
def test_a_bucket_damaged_on_the_way_is_sent_again(disturb: Disturb, args: tuple[str, ...]) -> None:
    faults = ("sigkill@between:rank=0,step=2", "bitflip@transfer:rank=2,step=2")
    job = disturb(4, 4, *faults, args=(*SMALL_BUCKETS, *args))
    fill = transfers(job, 0)[-1]
    assert int(str(fill["kept"])) > 0, "what arrived whole is not sent again"


@pytest.mark.long
def test_a_bit_that_flipped_in_one_of_many_replicas_of_experts(disturb: Disturb) -> None:
    faults = ("bitflip@between:rank=1,step=2", "exception@before_optimizer:rank=0,step=3")
    job = disturb(8, 4, *faults, args=(*EP2_FOUR_HOLDERS, *CHECKSUM))
    (fill,) = transfers(job, 1)
    assert fill["sources"] == [3, 5, 7]


def test_a_bit_that_flipped_in_one_of_two_replicas_is_found_and_nobody_guesses(attempt: Attempt) -> None:
    faults = ("bitflip@between:rank=1,step=2", "exception@before_optimizer:rank=0,step=3")
    job = attempt(4, args=(*small(4, 4), *CHECKSUM), faults=faults, code=1)
    assert "the replicas of the shard of ranks 1, 3 differ at step 2" in job.said[-1]


def test_a_victim_that_waits_in_a_transfer_is_not_taken_for_the_culprit(disturb: Disturb) -> None:
    faults = ("sigkill@between:rank=0,step=2", "hang@transfer:rank=2,step=2")
    job = disturb(6, STEPS, *faults, args=CHECKED, heartbeat_timeout_s=4.0)
    assert job.incidents[-1].culprit == 2
    assert 0 not in job.incidents[-1].respawned  # it waited; rank 2 may have left its block when it was asked to


@pytest.mark.long  # test_users_runs.py loses a node with streams of its own
@pytest.mark.parametrize("fault", ["sigkill@before_optimizer:rank=1,step=4"])
def test_streams_lost_with_a_node_come_back_from_the_next(disturb: Disturb, fault: str) -> None:
    args = (*DROPOUT, *JUMP, LOST_BOARD.format(ranks="[1,3]"))
    job = disturb(4, 6, fault, args=args)
    assert job.incidents[-1].target == 3


def test_streams_that_are_nowhere_are_not_replaced_by_others(attempt: Attempt) -> None:
    args = (*small(4, 6), *DROPOUT, LOST_BOARD.format(ranks="[1]"))
    job = attempt(4, args=args, faults=("sigkill@before_optimizer:rank=1,step=4",), code=1)
    assert "the random streams of rank 1 after step 3 are lost" in job.said[-1]
