"""Test local checkpoints: lost nodes, damaged files and full disks lead to no mixture and no hang."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import players
from tests.ranks.nemo_zygote import Zygote
from tests.ranks.players import Outcomes, raised, returned

pytestmark = pytest.mark.ranks
RANKS = "tests.ranks.local_checkpoint_ranks"
#: Jobs of four ranks on two nodes, with copies on the other node, if settings do not say otherwise.
Job = partial(players.Job, world=4, play=f"{RANKS}:play")


@pytest.fixture
def job(nemo_zygote: Zygote, tmp_path: Path) -> players.Job:
    return Job(nemo_zygote, tmp_path)


def whole(iteration: int, world: int = 4) -> list[dict[str, Any]]:
    """Return what loading an iteration gives on every rank if nothing is wrong."""
    return [{"iteration": iteration, "equal": True, "own": True}] * world


def found_and_loaded(outcomes: Outcomes, call: int, iteration: int, world: int = 4) -> None:
    assert returned(outcomes, call) == [iteration] * world
    assert returned(outcomes, call + 1) == whole(iteration, world)


FIND_AND_LOAD = (["find"], ["load"])


def test_the_newest_save_is_found_by_new_processes_and_two_are_kept(job: players.Job) -> None:
    outcomes = job.run(
        *FIND_AND_LOAD, ["save", 1, 2, 3], ["renew"], *FIND_AND_LOAD, ["renew"], ["save", 4], ["files"]
    )
    assert returned(outcomes, 0) == [-1] * 4
    assert all("no rank has a local checkpoint" in each for each in raised(outcomes, 1, "LocalCheckpointError"))
    found_and_loaded(outcomes, 4, 3)
    names = [file.replace("/iter_", ".").split(".") for file in returned(outcomes, 8)[0]]
    assert sorted(
        (node, int(iteration), part, holder) for node, iteration, _, _, part, holder, _ in names
    ) == sorted(
        (f"node{rank // 2}", iteration, f"part_{part}", f"held_{rank}")
        for rank in range(4)
        for part in (rank % 2, rank % 2 + 2)
        for iteration in (3, 4)
    ), "each node has its own parts and those of the other; a new process finds out what it may delete"


def test_a_lost_node_gets_its_parts_back_from_the_other(job: players.Job) -> None:
    outcomes = job.run(
        ["save", 5],
        ["swap", "node0", "node1"],
        ["renew"],
        ["load"],
        ["delete", "node0"],
        ["renew"],
        *FIND_AND_LOAD,
        ["files", "*part_[01].held_[01].ckpt"],
        ["delete", "node1"],
        ["renew"],
        ["find"],
    )
    assert returned(outcomes, 3) == whole(5), "nodes have changed places"
    found_and_loaded(outcomes, 6, 5)
    there = [file for file in returned(outcomes, 8)[0] if file.startswith("node0/")]
    assert len(there) == 2, "they are kept where they belong, too"
    assert returned(outcomes, 11) == [-1] * 4, "the first node's copies of the second were not made again"


@pytest.mark.long
@pytest.mark.parametrize(("world", "factor", "lost"), [(3, 3, [0, 2]), (4, 2, [0, 3])])
def test_nodes_of_one_rank(nemo_zygote: Zygote, tmp_path: Path, world: int, factor: int, lost: list[int]) -> None:
    job = Job(nemo_zygote, tmp_path, world=world, jump=1, factor=factor, node_size=1)
    outcomes = job.run(["save", 5], ["delete", *(f"node{number}" for number in lost)], ["renew"], ["load"])
    assert returned(outcomes, 3) == whole(5, world)


def test_damage_leads_to_a_copy_then_to_an_older_save_and_then_to_words_on_every_rank(job: players.Job) -> None:
    outcomes = job.run(
        ["save", 3, 5],
        ["damage", "node0/iter_0000000005.*.part_0.held_0.ckpt"],
        *FIND_AND_LOAD,
        ["damage", "*/iter_0000000005.*.part_0.*"],
        *FIND_AND_LOAD,
        ["find"],
        ["delete", "*/iter_0000000003.*.part_1.*"],
        ["load"],
        ["find"],
    )
    found_and_loaded(outcomes, 2, 5)
    found_and_loaded(outcomes, 5, 3)
    words = raised(outcomes, 9, "NoReplicasAvailableError")  # it was lost after it was found
    assert all("part 1 of iteration 3" in each and "part 0" not in each for each in words)
    assert returned(outcomes, 10) == [-1] * 4


def test_copies_that_are_lost_after_they_were_found(job: players.Job) -> None:
    outcomes = job.run(["save", 3, 5], ["find"], ["delete", "*/iter_0000000005.*.part_1.*"], ["load"], ["load"])
    assert returned(outcomes, 1) == [5] * 4
    assert all("part 1 of iteration 5" in each for each in raised(outcomes, 3, "NoReplicasAvailableError"))
    assert returned(outcomes, 4) == whole(3), "who asks again gets the older one"


def test_parts_of_two_saves_of_one_iteration_are_not_mixed(nemo_zygote: Zygote, tmp_path: Path) -> None:
    first = Job(nemo_zygote, tmp_path / "first", jump=None)
    second = Job(nemo_zygote, tmp_path / "second", jump=None)
    for each in (first, second):
        each.run(["save", 5])
    shutil.rmtree(second.root / "node1")
    shutil.copytree(first.root / "node1", second.root / "node1")
    outcomes = second.run(["find"], ["load"], ["delete", "node0"], ["renew"], ["find"])
    assert returned(outcomes, 0) == returned(outcomes, 4) == [-1] * 4
    words = raised(outcomes, 1, "NoReplicasAvailableError")
    assert all("part 2 of iteration 5, part 3 of iteration 5" in each for each in words)


def test_a_rank_that_cannot_write_costs_the_save_and_the_one_before_stays(
    nemo_zygote: Zygote, tmp_path: Path
) -> None:
    alone = Job(nemo_zygote, tmp_path / "alone", jump=None)
    calls = (["save", 5], ["full_disk", 1], ["save", 6], ["save_async", 7], ["wait"], ["find"], ["room_again"])
    outcomes = alone.run(*calls, ["files"], ["save", 8], ["load"])
    assert returned(outcomes, 2) == [None] * 4
    assert returned(outcomes, 4) == [True] * 4
    assert returned(outcomes, 5) == [5] * 4
    assert all("/iter_0000000005" in file for file in returned(outcomes, 7)[0]), "nothing of the others is left"
    assert returned(outcomes, 9) == whole(8)
    with_copies = Job(nemo_zygote, tmp_path / "copies")
    found_and_loaded(with_copies.run(*calls[:3], ["room_again"], *FIND_AND_LOAD), 4, 6)


def test_asynchronous_saves(job: players.Job) -> None:
    outcomes = job.run(["save_async", 5], ["wait"], ["save_async", 6], ["wait"], ["load"], ["renew"], ["load"])
    assert returned(outcomes, 1) == [True] * 4
    assert returned(outcomes, 4) == whole(6), "what was trained on meanwhile is not in it"
    assert returned(outcomes, 6) == whole(6)


def test_what_one_rank_cannot_do_is_refused_on_all(job: players.Job) -> None:
    outcomes = job.run(
        ["save_unsafe", 5, 2],
        ["find"],
        ["files"],
        ["save_different"],
        ["save", 4],
        ["save_of_a_class_known_to", 1],
        *FIND_AND_LOAD,
    )
    words = raised(outcomes, 0, "LocalCheckpointError")
    assert all("rank 2: state['callbacks'][0] is a object" in each for each in words)
    assert returned(outcomes, 1) == [-1] * 4
    assert returned(outcomes, 2) == [[]] * 4
    words = raised(outcomes, 3, "LocalCheckpointError")
    assert all("rank 0: save 10; rank 1: save 11" in each for each in words)
    words = raised(outcomes, 5, "LocalCheckpointError")
    assert all("rank 3" in each and "is not known on this rank: call register_form" in each for each in words)
    found_and_loaded(outcomes, 6, 4)


def test_a_rank_with_a_new_process_among_old_ones(job: players.Job) -> None:
    outcomes = job.run(
        ["save", 5], ["renew", 1], ["save", 6], ["save_async", 7], ["renew", 2], ["save", 8], ["load"], ["files"]
    )
    assert returned(outcomes, 6) == whole(8)
    assert len(returned(outcomes, 7)[0]) == 16


@pytest.mark.long
def test_process_groups_that_are_made_anew(job: players.Job) -> None:
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
    assert [outcome["plan"] for outcome in outcomes] == [[[2, 0, ["of-0"]]], [[3, 1, ["of-1"]]]] * 2
    assert all("nobody's" in outcome["refused"] for outcome in outcomes)
    assert {outcome["timeout_s"] for outcome in outcomes} == {20.0}, "that of the job's process group"


def test_a_member_that_cannot_replicate_is_not_waited_for(nemo_zygote: Zygote) -> None:
    words = nemo_zygote.run(2, f"{RANKS}:one_cannot_replicate", {"jump": 1, "factor": 2})
    assert all("state['hook'] is a builtin_function_or_method" in each for each in words)
    assert "rank 1 has nothing to replicate" in words[0]


def test_cliques_that_cannot_be(nemo_zygote: Zygote) -> None:
    expected = {
        "2 ranks cannot be divided into cliques of 2 ranks that are 2 apart": [[2, 2], 2],
        "give replication_jump=1": [[0, 0], 2],
        "LOCAL_WORLD_SIZE is not set": [[0, 0], 0],
        "the ranks ask for different cliques": [[1, 2], 2],
        "must be positive": [[-1, -1], 2],
        "nothing was raised": [[1, 1], 2],
    }
    outcomes = nemo_zygote.run(2, f"{RANKS}:cliques_asked_for", {"cases": [*expected.values()]})
    for words in outcomes:
        assert all(part in each for part, each in zip(expected, words, strict=True)), words


@pytest.mark.nemo
@pytest.mark.parametrize("in_background", [pytest.param(False, marks=pytest.mark.long), True])
def test_nemos_own_callback_saves_and_resumes_although_a_node_is_lost(
    nemo_zygote: Zygote, tmp_path: Path, in_background: bool
) -> None:
    """NeMo's ``MCoreHierarchicalCheckpointIO`` and NVRx's ``LocalCheckpointCallback`` are given our manager."""
    function = "tests.ranks.local_checkpoint_nemo:train"
    common = {"root": str(tmp_path), "overrides": ["trainer.max_steps=6", "model.config.num_layers=2"]}
    trained = nemo_zygote.run(2, function, {**common, "every": 4, "in_background": in_background}, limit_s=200)
    assert [(rank["found"], rank["files"]) for rank in trained] == [(4, 2)] * 2
    shutil.rmtree(tmp_path / "node0")
    resumed = nemo_zygote.run(2, function, {**common, "resume": True}, limit_s=200)
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
        pytest.param(2, {"resumes": ["two", "one"]}, [-1, 6], marks=pytest.mark.long),
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
