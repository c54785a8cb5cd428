"""Test that Megatron's checkpoints come from copies, else from storage once, and that no two are ever mixed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.nemo_zygote import Zygote
from tests.ranks.players import Job, Outcomes, raised, returned

pytestmark = [pytest.mark.ranks, pytest.mark.nemo]
MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(nemo_zygote: Zygote, tmp_path: Path) -> MakeJob:
    """Return a function for jobs of two ranks, if not told otherwise, with the same directories."""
    return partial(Job, nemo_zygote, tmp_path, world=2, play="tests.ranks.dist_checkpoint_ranks:play")


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    return make_job()


def raised_alike(outcomes: Outcomes, call: int, kind: str) -> str:
    """Require that a call raised the same one line of ``kind`` on every rank, and return it."""
    (words,) = set(raised(outcomes, call, kind))
    assert "\n" not in words
    return words


def warnings(outcomes: Outcomes, call: int) -> str:
    """Return all that was warned of on any rank."""
    return "\n".join(line for rank in outcomes for line in rank[call]["warnings"])


def loaded(outcomes: Outcomes, call: int) -> tuple[int, set[str]]:
    """Require that a load gave what was saved; return the bytes read from storage, and where tensors came from."""
    each = returned(outcomes, call)
    assert all(rank["equal"] and rank["in_place"] for rank in each), each
    return sum(rank["read"] for rank in each), set(each[0]["from"])


def test_a_checkpoint_comes_from_memory_without_its_tensors_being_read(job: Job) -> None:
    outcomes = job.run(["save", "a", 1], ["load", "a", 1], ["load", "a", 1, "megatron"])
    read, places = loaded(outcomes, 1)
    assert places == {"memory"}
    plain, _ = loaded(outcomes, 2)
    assert 0 < read < plain / 5, "only the object that is not made of plain values"


def test_what_megatron_saves_we_load_with_each_chunk_read_once(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(world=4)
    outcomes = job.run(
        ["save", "a", 1, "megatron"], ["load", "a", 1], ["load", "a", 1, "megatron"], ["metadata", "a"]
    )
    read, places = loaded(outcomes, 1)
    assert places == {"storage"}
    stored = sum(path.stat().st_size for path in (tmp_path / "a").glob("*.distcp"))
    opaque = 3 * 1500  # the object that cannot be sent is read by the other three, too
    assert stored <= read <= stored + opaque
    assert loaded(outcomes, 2)[0] > 2 * stored
    assert "exp_avg" in returned(outcomes, 3)[0]


@pytest.mark.parametrize("how", ["copies", pytest.param("parallel", marks=pytest.mark.long)])
def test_what_we_save_megatron_loads_and_later_ranks_find_on_disks(make_job: MakeJob, how: str) -> None:
    job = make_job(disk=True)
    job.run(["save", "a", 1, how])
    outcomes = job.run(["load", "a", 1, "megatron"], ["load", "a", 1])
    loaded(outcomes, 0)
    assert loaded(outcomes, 1)[1] == {"disk"}


@pytest.mark.long
def test_another_number_of_ranks_takes_from_copies_what_is_cut_alike(make_job: MakeJob) -> None:
    job = make_job(world=4, disk=True)
    job.run(["save", "a", 1])
    outcomes = job.run(["load", "a", 1], ["load", "a", 1, "megatron"], world=2)
    ours = [rank[0]["returned"] for rank in outcomes]
    assert all(rank["tensors"] and rank["in_place"] for rank in ours), ours
    assert ours[0]["from"].keys() == {"disk", "storage"}, ours


def test_a_new_process_gets_its_share_from_a_neighbours_memory(make_job: MakeJob) -> None:
    job = make_job(factor=2)
    outcomes = job.run(["save", "a", 1], ["forget", 1], ["load", "a", 1], ["parts"])
    assert loaded(outcomes, 2)[1] == {"memory"}
    assert returned(outcomes, 3) == [[[0, 1]], [[]]]


@pytest.mark.long
def test_without_a_neighbour_only_what_is_lost_is_read_from_storage(job: Job) -> None:
    outcomes = job.run(["save", "a", 1], ["forget", 1], ["load", "a", 1])
    assert loaded(outcomes, 2)[1] == {"memory", "storage"}


def test_a_flipped_bit_on_a_disk_is_found_and_taken_from_the_copy(make_job: MakeJob) -> None:
    job = make_job(factor=2, disk=True, memory=False)
    job.run(["save", "a", 1])
    outcomes = job.run(["damage", "disk0/*part_0.held_0.ckpt"], ["load", "a", 1])
    assert loaded(outcomes, 1)[1] == {"disk"}
    said = warnings(outcomes, 1)
    assert "part_0.held_0.ckpt is truncated or damaged" in said
    outcomes = job.run(["damage", "disk1/*part_0.*"], ["load", "a", 1])
    assert loaded(outcomes, 1)[1] == {"disk", "storage"}, "now both copies are damaged"


@pytest.mark.long
def test_a_flipped_bit_in_memory_is_found_and_taken_from_the_next_place(make_job: MakeJob) -> None:
    job = make_job(factor=2, disk=True)
    outcomes = job.run(
        ["save", "a", 1], ["damage_memory", 0, 0], ["load", "a", 1], ["damage_memory", 1, 0], ["load", "a", 1]
    )
    assert loaded(outcomes, 2)[1] == {"memory"}
    assert "part 0 of iteration 0 is damaged" in warnings(outcomes, 2)
    assert loaded(outcomes, 4)[1] == {"memory", "disk"}


def test_copies_of_another_checkpoint_are_never_used(job: Job) -> None:
    outcomes = job.run(
        ["save", "a", 1],
        ["save", "a", 2, "megatron"],
        ["load", "a", 2],
        ["save", "b", 3],
        ["rename", "b", "c"],
        ["load", "c", 3],
        ["save", "d", 4],
        ["load", "d", 4],
    )
    assert loaded(outcomes, 2)[1] == loaded(outcomes, 5)[1] == {"storage"}
    assert "is of another checkpoint" in warnings(outcomes, 2)
    assert "is of another checkpoint" in warnings(outcomes, 5)
    assert loaded(outcomes, 7)[1] == {"memory"}


def test_a_save_goes_on_while_training_does(make_job: MakeJob) -> None:
    job = make_job(disk=True)
    outcomes = job.run(
        ["save_async", "a", 1],
        ["save_async", "b", 2, "parallel"],
        ["finish"],
        ["load", "b", 2],
        ["load", "a", 1],
        ["load", "a", 1, "megatron"],
        ["parts"],
    )
    assert returned(outcomes, 2) == [[0, 1]] * 2
    assert loaded(outcomes, 3)[1] == {"memory"}
    assert loaded(outcomes, 4)[1] == {"storage"}, "only the newest whole one is kept"
    loaded(outcomes, 5)
    assert returned(outcomes, 6) == [[[rank], [rank]] for rank in range(2)]


@pytest.mark.parametrize("fault", [pytest.param("no_room", marks=pytest.mark.long), "kill_writer"])
def test_a_failed_write_to_storage_costs_that_checkpoint_only(job: Job, fault: str) -> None:
    before = [["no_room", "b"]] if fault == "no_room" else []
    after = [["kill_writer"]] if fault == "kill_writer" else []
    calls: list[list[Any]] = [
        ["save", "a", 1],
        *before,
        ["save_async", "b", 2],
        *after,
        ["finish"],
        ["is_whole", "b"],
        ["load", "a", 1],
        ["save_async", "c", 3],
        ["finish"],
        ["load", "c", 3],
    ]
    outcomes = job.run(*calls)
    finish = 3
    assert returned(outcomes, finish) == [[0]] * 2
    assert "b did not get to storage: rank" in warnings(outcomes, finish)
    assert returned(outcomes, finish + 1) == [False] * 2
    assert loaded(outcomes, finish + 2)[1] == {"memory"}, "the one before it"
    assert loaded(outcomes, finish + 5)[1] == {"memory"}


def test_bad_input_is_one_line_on_all_ranks(job: Job) -> None:
    outcomes = job.run(
        ["save", "a", 1],
        ["load", "a", 1, "copies", True],
        ["no_room", "b"],
        ["save", "b", 2],
        ["forget", 0, 1],
        ["remove", "a/__1_*"],
        ["load", "a", 1],
        ["save", "a", 1],
        ["load", "a", 1],
    )
    words = raised_alike(outcomes, 1, "LoadError")
    assert "tensor new at [0] is in no copy and not in the checkpoint: check that the model" in words
    assert "b did not get to storage: rank" in raised_alike(outcomes, 3, "DrainError")
    assert "FileNotFoundError" in raised_alike(outcomes, 6, "LoadError")
    assert loaded(outcomes, 8)[1] == {"memory"}


def test_the_strategies_are_registered_by_one_call(job: Job) -> None:
    assert returned(job.run(["load_registered", "a", 1]), 0) == [True] * 2
