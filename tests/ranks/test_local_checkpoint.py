"""Test local checkpoints: lost nodes, damaged files and full disks lead to no mixture and no hang."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.nemo_zygote import Zygote

pytestmark = pytest.mark.ranks
RANKS = "tests.ranks.local_checkpoint_ranks"
NODES_OF_TWO = {"LOCAL_WORLD_SIZE": "2"}
Outcomes = list[list[dict[str, Any]]]


class Job:
    """Starts ranks afresh for each list of calls, with directories that stay.

    Args:
        zygote: forks them.
        root: where the nodes' directories are.
        world: how many.
        **settings: of :func:`~tests.ranks.local_checkpoint_ranks.play`.
    """

    def __init__(self, zygote: Zygote, root: Path, world: int = 4, **settings: Any) -> None:
        self.zygote, self.root, self.world, self.settings = zygote, root, world, settings

    def run(self, *calls: Sequence[Any]) -> Outcomes:
        """Make the calls on every rank, and return each rank's outcomes."""
        arguments = {"root": str(self.root), "calls": calls, **self.settings}
        return self.zygote.run(self.world, f"{RANKS}:play", arguments, env=NODES_OF_TWO)

    def node(self, number: int) -> Path:
        return self.root / f"node{number}"

    def files(self, pattern: str = "*") -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob(pattern) if path.is_file())

    def damage(self, pattern: str) -> None:
        """Flip a bit in the middle of each of the files."""
        paths = list(self.root.glob(pattern))
        assert paths
        for path in paths:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)


@pytest.fixture
def job(nemo_zygote: Zygote, tmp_path: Path) -> Job:
    """Return a job of two nodes of two ranks each, with copies on the other node."""
    return Job(nemo_zygote, tmp_path)


def returned(outcomes: Outcomes, call: int) -> list[Any]:
    """Return what a call returned on each rank."""
    assert all("returned" in rank[call] for rank in outcomes), [rank[call] for rank in outcomes]
    return [rank[call]["returned"] for rank in outcomes]


def raised(outcomes: Outcomes, call: int, kind: str) -> list[str]:
    """Require that a call raised ``kind`` on every rank, and return the words of each."""
    assert [rank[call].get("raised") for rank in outcomes] == [kind] * len(outcomes), [
        rank[call] for rank in outcomes
    ]
    return [rank[call]["words"] for rank in outcomes]


def whole(iteration: int, world: int = 4) -> list[dict[str, Any]]:
    """Return what loading an iteration gives on every rank if nothing is wrong."""
    return [{"iteration": iteration, "equal": True, "own": True}] * world


def test_what_was_saved_is_found_and_loaded(job: Job) -> None:
    job.run(["save", 3, 5])
    outcomes = job.run(["find"], ["load"])
    assert returned(outcomes, 0) == [5] * 4
    assert returned(outcomes, 1) == whole(5)


def test_each_node_has_its_own_parts_and_those_of_the_other(job: Job) -> None:
    job.run(["save", 5])
    names = [(file.split("/")[0], file.split(".part_")[1]) for file in job.files()]
    assert sorted(names) == sorted(
        (f"node{rank // 2}", f"{part}.held_{rank}.ckpt") for rank in range(4) for part in (rank % 2, rank % 2 + 2)
    )


def test_a_lost_node_gets_its_parts_back_from_the_other(job: Job) -> None:
    job.run(["save", 5])
    shutil.rmtree(job.node(0))
    outcomes = job.run(["find"], ["load"])
    assert returned(outcomes, 0) == [5] * 4
    assert returned(outcomes, 1) == whole(5)
    assert len(list(job.node(0).glob("*part_[01].held_[01].ckpt"))) == 2, "they are kept where they belong, too"
    shutil.rmtree(job.node(1))
    assert returned(job.run(["find"]), 0) == [-1] * 4, "the first node's copies of the second were not made again"


@pytest.mark.long
@pytest.mark.parametrize(("world", "factor", "lost"), [(3, 3, [0]), (3, 3, [0, 2]), (4, 2, [0, 3])])
def test_nodes_of_one_rank(nemo_zygote: Zygote, tmp_path: Path, world: int, factor: int, lost: list[int]) -> None:
    job = Job(nemo_zygote, tmp_path, world, jump=1, factor=factor, node_size=1)
    job.run(["save", 5])
    for number in lost:
        shutil.rmtree(job.node(number))
    outcomes = job.run(["load"])
    assert returned(outcomes, 0) == whole(5, world)


@pytest.mark.long
def test_nodes_that_have_changed_places(job: Job) -> None:
    job.run(["save", 5])
    job.node(0).rename(job.root / "node")
    job.node(1).rename(job.node(0))
    (job.root / "node").rename(job.node(1))
    assert returned(job.run(["load"]), 0) == whole(5)


def test_a_damaged_part_is_replaced_by_a_copy(job: Job) -> None:
    job.run(["save", 3, 5])
    job.damage("node0/iter_0000000005.*.part_0.held_0.ckpt")
    outcomes = job.run(["find"], ["load"])
    assert returned(outcomes, 0) == [5] * 4
    assert returned(outcomes, 1) == whole(5)


def test_a_part_that_is_damaged_in_all_places_makes_the_older_one_the_newest(job: Job) -> None:
    job.run(["save", 3, 5])
    job.damage("*/iter_0000000005.*.part_0.*")
    outcomes = job.run(["find"], ["load"])
    assert returned(outcomes, 0) == [3] * 4
    assert returned(outcomes, 1) == whole(3)


def test_an_incomplete_newest_iteration_is_not_found(job: Job) -> None:
    job.run(["save", 3, 5], ["delete", "*/iter_0000000005.*.part_1.*"])
    outcomes = job.run(["find"], ["load"])
    assert returned(outcomes, 0) == [3] * 4
    assert returned(outcomes, 1) == whole(3)


def test_without_any_copy_every_rank_is_told_which_part_is_lost(job: Job) -> None:
    job.run(["save", 5], ["delete", "*/*.part_1.*"])
    outcomes = job.run(["load"], ["find"])
    words = raised(outcomes, 0, "NoReplicasAvailableError")
    assert all("part 1 of iteration 5" in each and "part 0" not in each for each in words)
    assert returned(outcomes, 1) == [-1] * 4


def test_copies_that_are_lost_after_they_were_found(job: Job) -> None:
    job.run(["save", 3, 5])
    outcomes = job.run(["find"], ["delete", "*/iter_0000000005.*.part_1.*"], ["load"], ["load"])
    assert returned(outcomes, 0) == [5] * 4
    words = raised(outcomes, 2, "NoReplicasAvailableError")
    assert all("part 1 of iteration 5" in each for each in words)
    assert returned(outcomes, 3) == whole(3), "who asks again gets the older one"


def test_nothing_was_ever_saved(job: Job) -> None:
    outcomes = job.run(["find"], ["load"])
    assert returned(outcomes, 0) == [-1] * 4
    assert all("no rank has a local checkpoint" in each for each in raised(outcomes, 1, "LocalCheckpointError"))


def test_parts_of_two_saves_of_one_iteration_are_not_mixed(nemo_zygote: Zygote, tmp_path: Path) -> None:
    first = Job(nemo_zygote, tmp_path / "first", jump=None)
    second = Job(nemo_zygote, tmp_path / "second", jump=None)
    for each in (first, second):
        each.run(["save", 5])
    shutil.rmtree(second.node(1))
    shutil.copytree(first.node(1), second.node(1))
    assert len(second.files()) == 4
    assert returned(second.run(["find"]), 0) == [-1] * 4
    shutil.rmtree(second.node(0))
    shutil.copytree(first.node(0), second.node(0))
    assert returned(second.run(["find"]), 0) == [5] * 4


def test_without_replication_a_lost_node_is_lost(nemo_zygote: Zygote, tmp_path: Path) -> None:
    job = Job(nemo_zygote, tmp_path, jump=None)
    job.run(["save", 5])
    assert returned(job.run(["find"], ["load"]), 1) == whole(5)
    shutil.rmtree(job.node(0))
    outcomes = job.run(["find"], ["load"])
    assert returned(outcomes, 0) == [-1] * 4
    assert all(
        "part 0 of iteration 5, part 1 of iteration 5" in each
        for each in raised(outcomes, 1, "NoReplicasAvailableError")
    )


def test_two_saves_are_kept_on_every_rank(job: Job) -> None:
    job.run(["save", 1, 2, 3])
    assert len(job.files("iter_0000000001.*")) == 0
    assert len(job.files("iter_0000000002.*")) == len(job.files("iter_0000000003.*")) == 8
    job.run(["save", 4])
    assert len(job.files()) == 16, "a new process finds out what it may delete"
    assert len(job.files("iter_0000000003.*")) == len(job.files("iter_0000000004.*")) == 8


def test_a_rank_that_cannot_write_costs_the_save_and_the_one_before_stays(
    nemo_zygote: Zygote, tmp_path: Path
) -> None:
    job = Job(nemo_zygote, tmp_path, jump=None)
    outcomes = job.run(["save", 5], ["full_disk", 1], ["save", 6], ["find"], ["room_again"], ["save", 7], ["load"])
    assert returned(outcomes, 2) == [None] * 4
    assert returned(outcomes, 3) == [5] * 4
    assert returned(outcomes, 6) == whole(7)
    assert not job.files("*.tmp")
    assert not job.files("iter_0000000006*")


def test_with_replication_what_one_rank_could_not_write_costs_nothing(job: Job) -> None:
    outcomes = job.run(["save", 5], ["full_disk", 1], ["save", 6], ["room_again"], ["find"], ["load"])
    assert returned(outcomes, 4) == [6] * 4
    assert returned(outcomes, 5) == whole(6)


@pytest.mark.parametrize("jump", [None, 0])
def test_asynchronous_saves(nemo_zygote: Zygote, tmp_path: Path, jump: int | None) -> None:
    job = Job(nemo_zygote, tmp_path, jump=jump)
    outcomes = job.run(["save_async", 5], ["wait"], ["save_async", 6], ["wait"], ["load"])
    assert returned(outcomes, 1) == [True] * 4
    assert returned(outcomes, 4) == whole(6), "what was trained on meanwhile is not in it"
    assert returned(job.run(["find"], ["load"]), 1) == whole(6)


def test_an_asynchronous_save_that_one_rank_cannot_write(nemo_zygote: Zygote, tmp_path: Path) -> None:
    job = Job(nemo_zygote, tmp_path, jump=None)
    outcomes = job.run(
        ["save", 5], ["full_disk", 1], ["save_async", 6], ["wait"], ["room_again"], ["find"], ["load"]
    )
    assert returned(outcomes, 3) == [True] * 4
    assert returned(outcomes, 5) == [5] * 4
    assert returned(outcomes, 6) == whole(5)


def test_a_state_that_cannot_be_saved_is_refused_on_all_ranks(job: Job) -> None:
    outcomes = job.run(["save_unsafe", 5, 2], ["find"])
    words = raised(outcomes, 0, "LocalCheckpointError")
    assert all("rank 2: state['callbacks'][0] is a object" in each for each in words)
    assert returned(outcomes, 1) == [-1] * 4
    assert job.files() == []


def test_a_class_that_not_all_ranks_know_is_told_to_all_of_them(job: Job) -> None:
    outcomes = job.run(["save", 4], ["save_of_a_class_known_to", 1], ["find"], ["load"])
    words = raised(outcomes, 1, "LocalCheckpointError")
    assert all("rank 3" in each and "is not known on this rank: call register_form" in each for each in words)
    assert returned(outcomes, 3) == whole(4)


def test_ranks_that_save_different_iterations_are_all_told(job: Job) -> None:
    words = raised(job.run(["save_different"]), 0, "LocalCheckpointError")
    assert all("rank 0: save 10; rank 1: save 11" in each for each in words)


def test_a_rank_with_a_new_process_among_old_ones(job: Job) -> None:
    outcomes = job.run(
        ["save", 5], ["renew", 1], ["save", 6], ["save_async", 7], ["renew", 2], ["save", 8], ["load"]
    )
    assert returned(outcomes, 6) == whole(8)
    assert len(job.files()) == 16


@pytest.mark.long
def test_process_groups_that_are_made_anew(job: Job) -> None:
    outcomes = job.run(["save", 5], ["regroup"], ["find"], ["save", 6], ["regroup"], ["load"])
    assert returned(outcomes, 2) == [5] * 4
    assert returned(outcomes, 5) == whole(6)


def test_a_strategy_without_a_manager(nemo_zygote: Zygote) -> None:
    outcomes = nemo_zygote.run(4, f"{RANKS}:strategy_alone", {"jump": 2, "factor": 2})
    assert [outcome["peers"] for outcome in outcomes] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [outcome["ids"] for outcome in outcomes] == [["of-0", "of-2"], ["of-1", "of-3"]] * 2
    assert all(outcome["replicas"] == [True, True] for outcome in outcomes)
    assert [outcome["arrived"] for outcome in outcomes] == [["of-0"], ["of-1"], [], []]
    assert all(outcome["equal"] for outcome in outcomes)
    assert [outcome["plan"] for outcome in outcomes] == [[["of-0", 0, [2]]], [["of-1", 1, [3]]]] * 2
    assert all("nobody's" in outcome["refused"] for outcome in outcomes)
    assert {outcome["timeout_s"] for outcome in outcomes} == {20.0}, "that of the job's process group"


def test_a_member_that_cannot_replicate_is_not_waited_for(nemo_zygote: Zygote) -> None:
    words = nemo_zygote.run(2, f"{RANKS}:one_cannot_replicate", {"jump": 1, "factor": 2})
    assert all("state['hook'] is a builtin_function_or_method" in each for each in words)
    assert "rank 1 has nothing to replicate" in words[0]


@pytest.mark.parametrize(
    ("jumps", "env", "expected"),
    [
        ([2, 2], {}, "2 ranks cannot be divided into cliques of 2 ranks that are 2 apart"),
        ([0, 0], {}, "give replication_jump=1"),
        ([0, 0], {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is not set"),
        ([1, 2], {}, "the ranks ask for different cliques"),
        ([-1, -1], {}, "must be positive"),
        ([1, 1], {}, "nothing was raised"),
    ],
)
def test_cliques_that_cannot_be(nemo_zygote: Zygote, jumps: list[int], env: dict[str, str], expected: str) -> None:
    words = nemo_zygote.run(2, f"{RANKS}:cliques_asked_for", {"jumps": jumps}, env=env)
    assert all(expected in each for each in words)


@pytest.mark.nemo
@pytest.mark.parametrize("in_background", [pytest.param(False, marks=pytest.mark.long), True])
def test_nemos_own_callback_saves_and_resumes_although_a_node_is_lost(
    nemo_zygote: Zygote, tmp_path: Path, in_background: bool
) -> None:
    """NeMo's ``MCoreHierarchicalCheckpointIO`` and NVRx's ``LocalCheckpointCallback`` are given our manager."""
    function = "tests.ranks.local_checkpoint_nemo:train"
    common = {"root": str(tmp_path), "overrides": ["trainer.max_steps=6", "model.config.num_layers=2"]}
    trained = nemo_zygote.run(2, function, {**common, "every": 4, "in_background": in_background}, limit_s=120)
    assert [(rank["found"], rank["files"]) for rank in trained] == [(4, 2)] * 2
    shutil.rmtree(tmp_path / "node0")
    resumed = nemo_zygote.run(2, function, {**common, "resume": True}, limit_s=120)
    for before, after in zip(trained, resumed):
        assert after["losses"] == before["losses"][4:]
        assert after["samples"] == before["samples"][-len(after["samples"]) :]
    assert len(resumed[0]["losses"]) == 2


@pytest.mark.nemo
@pytest.mark.parametrize(
    ("world", "settings", "found"),
    [
        pytest.param(2, {}, [6], marks=pytest.mark.long),
        pytest.param(2, {"is_async": True}, [6], marks=pytest.mark.long),
        (2, {"resumes": ["two", "one"]}, [-1, 6]),
        pytest.param(4, {"replication": [2, 2], "lost": "node1"}, [6], marks=pytest.mark.long),
        (4, {"replication": [2, 2], "lost": "node0", "is_lazy": False, "is_async": True}, [6]),
        pytest.param(4, {"lost": "node1"}, [-1], marks=pytest.mark.long),
    ],
    ids=["sync", "async", "sessions", "a node lost", "a node lost, async", "a node lost, no replicas"],
)
def test_a_script_for_nvrx_runs_with_other_imports(
    nemo_zygote: Zygote, tmp_path: Path, world: int, settings: dict[str, Any], found: list[int]
) -> None:
    """The same script with NVRx's own classes and with ours: both find and train the same."""
    outcomes = {}
    for whose in ("nvrx", "ours"):
        arguments = {"whose": whose, "root": str(tmp_path / whose), **settings}
        outcomes[whose] = nemo_zygote.run(world, "tests.ranks.local_checkpoint_scripts:play", arguments)
    assert outcomes["ours"] == outcomes["nvrx"]
    for rank, (_, *resumed) in enumerate(outcomes["ours"]):
        assert [each for each, _ in resumed] == found
        iteration, weights, *_ = resumed[-1][1]
        assert weights == [rank + iteration]
