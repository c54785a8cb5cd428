"""Test copies of the state in tiers: what no living rank holds any more comes back from them, equal to the bit."""

from collections.abc import Callable, Collection
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpointless.observability.report.incidents import IncidentSummary
from checkpointless.observability.report.verify import Steps, compare
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import Event
from checkpointless.replication import exchange as exchanges
from checkpointless.replication.exchange import CliqueExchange, clique_group
from checkpointless.replication.host_memory import HostMemoryPool
from checkpointless.replication.parts import Content, Part, PartId, SaveId
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Attempt, Job, Trainings, TrainingsOf, faults_in, run_job, small
from tests.ranks.layouts import DROPOUT, PP2, TP2
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

ONE_INSTANCE = ("strategy.num_distributed_optimizer_instances=1",)
PHASES = ("data", "forward", "backward", "sync", "before_optimizer", "optimizer", "after_optimizer", "between")
Kept = Callable[..., Job]


def tiers(**settings: str) -> tuple[str, ...]:
    """Return the override that asks for tiers, each with its settings as YAML."""
    return ("checkpointless.tiers={" + ", ".join(f"{name}: {{{value}}}" for name, value in settings.items()) + "}",)


def each_lost(incident: IncidentSummary) -> range:
    if incident.resumed_after is None or incident.committed is None:  # another incident took it over
        return range(0)
    return range(incident.resumed_after + 1, incident.committed + 1)


@pytest.fixture
def kept(of_recipe: Trainings) -> Kept:
    """Return a function that runs jobs with tiers, and compares them with undisturbed ones that have none."""

    def run(tiers: tuple[str, ...], steps: int, *faults: str, args: tuple[str, ...]) -> Job:
        args = (*small(4, steps), *args)
        job = of_recipe.run(4, (*args, *tiers), *faults)
        verdict = compare(of_recipe.calm(4, *args).steps, job.steps)
        assert verdict.difference is None, f"{verdict.sentence}\n{job.story()}"
        assert not verdict.missing, f"{verdict.sentence}\n{job.story()}"
        assert verdict.steps == steps
        again = {place.step for place in verdict.repeated}
        assert again <= {step for each in job.incidents for step in each_lost(each)}
        return job

    return run


def taken(job: Job) -> list[Event]:
    """Return, in the order of the log, where each rank's state came from."""
    return job.events(EventName.COPIES, "end")


def sources(job: Job, generation: int) -> dict[int | None, tuple[str, int]]:
    """Return the tier and the holder that each rank was filled from in a generation."""
    return {
        event.rank: (event.fields["tier"], event.fields["holder"])
        for event in taken(job)
        if event.generation == generation
    }


@pytest.mark.parametrize(
    "args",
    [pytest.param((), id="dp4", marks=pytest.mark.long), pytest.param(TP2, id="tp2", marks=pytest.mark.long)],
)
def test_one_instance_loses_no_finished_step(kept: Kept, args: tuple[str, ...]) -> None:
    """Each rank is killed in two phases; the copies of the step before are with its neighbor."""
    faults = faults_in(PHASES, "sigkill", 4)
    job = kept(
        tiers(neighbor_memory="overlap: false"), 2 * len(PHASES) + 2, *faults, args=(*ONE_INSTANCE, *args, *DROPOUT)
    )
    for incident, step, phase in zip(job.incidents, count(2, 2), PHASES):
        assert incident.respawned == (step // 2 % 4,)
        made = phase in ("after_optimizer", "between")
        assert incident.resumed_after == (step if made else step - 1), phase
        # The others make the step of a kill in an update if they have its gradients before they hear of the kill.
        assert incident.steps_lost in ((0, 1) if phase == "optimizer" else (0,)), phase


@pytest.mark.long
def test_pipeline_stages(kept: Kept) -> None:
    """Megatron has groups of single stages, so ranks of different stages have made different numbers of groups."""
    faults = ("sigkill@forward:rank=0,step=3", "sigkill@backward:rank=3,step=5")
    settings = "overlap: false, jump: 2"
    job = kept(tiers(neighbor_memory=settings), 6, *faults, args=(*ONE_INSTANCE, *PP2, *DROPOUT))
    assert [incident.resumed_after for incident in job.incidents] == [2, 4]


def both_holders_at(step: int) -> tuple[str, str]:
    """Return faults that kill both holders of the shard of ranks 0 and 2, the second before it can give it.

    When the first is killed, all ranks have the gradients of the step, and so what they waited for before it.
    """
    return f"sigkill@before_optimizer:rank=0,step={step}", f"sigkill@recovery:rank=2,step={step - 1}"


@pytest.mark.parametrize(
    ("settings", "after", "tier"),
    [
        pytest.param({"neighbor_memory": "overlap: false"}, 7, "neighbor memory", marks=pytest.mark.long),
        pytest.param({"local_directory": "path: {tmp}, every: 3"}, 6, "local directory", marks=pytest.mark.long),
        ({"shared_directory": "path: {tmp}, every: 5"}, 5, "shared directory"),
    ],
    ids=["neighbor", "local", "shared"],
)
def test_both_holders_of_a_shard_are_lost(
    kept: Kept, tmp_path: Path, settings: dict[str, str], after: int, tier: str
) -> None:
    """Storage has nothing; the newest copy that is whole is used, with the random streams that belong to it."""
    wanted = tiers(**{name: value.replace("{tmp}", str(tmp_path / "copies")) for name, value in settings.items()})
    job = kept(wanted, 10, *both_holders_at(8), args=DROPOUT)
    assert (job.incidents[-1].committed, job.incidents[-1].resumed_after) == (7, after)
    assert {sources(job, 2)[rank][0] for rank in (0, 2)} == {tier}
    lost = {event.fields["steps_lost"] for event in taken(job)}
    assert lost == {7 - after}


@pytest.mark.long
def test_copies_while_the_next_step_is_made(kept: Kept) -> None:
    """By default training does not wait: a rank that dies early in a step may cost the step before."""
    faults = [f"sigkill@{phase}:rank={rank},step={3 * rank + 3}" for rank, phase in enumerate(PHASES[:4])]
    job = kept(tiers(neighbor_memory="every: 1"), 14, *faults, args=(*ONE_INSTANCE, *DROPOUT))
    assert all(incident.steps_lost in (0, 1) for incident in job.incidents)


@pytest.mark.long
def test_faults_while_a_recovery_is_made_of_copies(kept: Kept) -> None:
    faults = ("sigkill@forward:rank=0,step=4", "exception@recovery:rank=3,step=3", "sigkill@data:rank=1,step=7")
    job = kept(tiers(neighbor_memory="overlap: false"), 8, *faults, args=(*ONE_INSTANCE, *DROPOUT))
    assert [incident.resumed_after for incident in job.incidents[-2:]] == [3, 6]


def test_a_rank_and_its_neighbor_are_lost_and_nothing_else_has_a_copy(attempt: Attempt) -> None:
    faults = ("sigkill@forward:rank=0,step=4", "sigkill@recovery:rank=1,step=3")
    args = (*small(4, 5), *ONE_INSTANCE, *tiers(neighbor_memory="overlap: false"))
    job = attempt(4, args=args, faults=faults, code=1)
    assert "no tier (neighbor memory) has the state of ranks 0, 1 after step 3" in job.said[-1]


@pytest.mark.long  # test_nodes.py loses nodes
def test_a_node_is_lost_whose_shards_nobody_else_trains_with(
    nemo_zygote: Zygote, undisturbed: Callable[..., Steps], tmp_path: Path
) -> None:
    args = (*small(4, 6), *ONE_INSTANCE, *DROPOUT)
    job = run_job(
        nemo_zygote,
        tmp_path / "run",
        2,
        nnodes=2,
        args=(*args, *tiers(neighbor_memory="overlap: false")),
        faults=("node@backward:rank=2,step=4",),
        spares=1,
        lost=(1,),
        node_timeout_s=4.0,
    )
    job.assert_same(undisturbed(4, args))
    assert job.incidents[-1].resumed_after == 3
    assert {rank: holder for rank, (_, holder) in sources(job, 1).items()} == {0: 0, 1: 1, 2: 0, 3: 1}


@pytest.mark.parametrize("overlap", [pytest.param("true", marks=pytest.mark.long), "false"])
def test_a_plain_loop(trainings_of: TrainingsOf, overlap: str) -> None:
    both = ("sigkill@before_optimizer:rank=1,step=5", "sigkill@recovery:rank=3,step=4")
    job = trainings_of(str(SCRIPTS / "plain_adamw.py")).rough(4, ("8", "2"), *both, more=(overlap,))
    assert job.incidents[-1].resumed_after == 4


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"neighbor_memory": "jump: 3"}, "4 ranks cannot keep a copy each, 3 ranks apart"),
        ({"local_directory": "path: /proc/none"}, "copies of the state cannot be kept: rank 0: local directory"),
    ],
    ids=["jump", "directory"],
)
def test_what_cannot_be_kept_is_said_before_training(attempt: Attempt, settings: dict[str, str], line: str) -> None:
    job = attempt(4, args=(*small(4, 3), *tiers(**settings)), code=1)
    assert line in job.told()
    assert not list((job.run_dir / "steps").glob("*")), "a step was made"


@pytest.mark.parametrize("world", [3, *(pytest.param(world, marks=pytest.mark.long) for world in (2, 4))])
def test_every_member_gets_all_parts_that_are_whole_and_that_it_has_room_for(
    nemo_zygote: Zygote, world: int
) -> None:
    lacking = {"nothing": [1], "no_room": [0]}
    cases = [{}, {}, {"is_staged": True, **lacking}, lacking, {"damaged": [1]}, {}]
    outcomes = nemo_zygote.run(world, "tests.ranks.test_tiers:exchange", {"cases": cases})

    def parts(rank: int, *absent: int) -> list[list[Any]]:
        present = [each for each in range(world) if each not in (rank, *absent)]
        return [[each, f"rank {each}", float(each * (1000 + each)), float(each)] for each in present]

    for rank, (first, second, staged, fewer, damaged, last) in enumerate(outcomes):
        assert first == second == last == parts(rank)
        assert staged == fewer == ([] if rank == 0 else parts(rank, 1))
        assert damaged == parts(rank, *([1] if rank == 2 % world else []))


def part_of(rank: int, pool: HostMemoryPool) -> Part:
    """Return a part that tells whose it is, of several chunks; rank 1's does not lie in one piece of memory."""
    tensors = torch.full((1000 + rank,), float(rank)), torch.tensor(rank)
    content = Content(f"rank {rank}".encode(), tensors)
    if rank != 1:
        content = pool.copy(content)
    return Part.sealed(PartId(SaveId(1, "0" * 24), rank), dist.get_world_size(), content)


def exchange(cases: list[dict[str, Any]]) -> list[list[Any]]:
    """Exchange parts in one clique of all ranks, case by case; return what this rank has after each, by sender."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    exchanges._CHUNK_BYTES = 1024
    pool, members = HostMemoryPool(), CliqueExchange(clique_group(1, dist.get_world_size()))
    found = []
    for case in cases:
        arrived = _exchanged(members, pool, **case)
        found.append(
            [
                [sender, part.content.structure.decode(), *(float(each.sum()) for each in part.content.tensors)]
                for sender, part in sorted(arrived.items())
            ]
        )
    dist.destroy_process_group()
    return found


def _exchanged(
    members: CliqueExchange,
    pool: HostMemoryPool,
    nothing: Collection[int] = (),
    no_room: Collection[int] = (),  # for others' parts
    damaged: Collection[int] = (),  # one of their messages
    is_staged: bool = False,  # messages go through a device, as over NCCL
) -> dict[int, Part]:
    rank, arrivals, send, left = dist.get_rank(), HostMemoryPool(), dist.isend, [1]
    members._device = torch.device("cpu", 0) if is_staged else torch.device("cpu")

    def sent(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if left and tensor.numel() > 64:  # a header, or a chunk of the tensors
            left.pop()
            tensor = tensor.clone()
            tensor[7] ^= 1
        return send(tensor, *args, **kwargs)

    def refused(*args: object) -> Content:
        raise MemoryError("no memory")

    if rank in no_room:
        arrivals.content = refused  # type: ignore[method-assign, assignment]
    dist.isend = sent if rank in damaged else send
    arrived = dict(members.exchange(None if rank in nothing else part_of(rank, pool), arrivals))
    dist.isend = send
    return arrived
