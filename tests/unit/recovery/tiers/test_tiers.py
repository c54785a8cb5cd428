"""Tiers: when copies are due, how far apart they are kept, what cannot be, and of which training they are."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.recovery import CheckpointManager, LocalDirectory, NeighborMemory, SharedDirectory
from checkpointless.replication import DirectoryStore
from checkpointless.replication.parts import Content, Part, PartId, SaveId
from checkpointless.replication.tiers import TIERS, Copies, _Lineage, make_tiers


def test_copies_are_due_after_each_so_many_steps() -> None:
    assert [step for step in range(-1, 10) if NeighborMemory(every=3).is_due(step)] == [3, 6, 9]


@pytest.mark.parametrize(
    ("world", "node", "jump", "distances"),
    [(8, 4, 0, [4, 1, 2]), (4, 4, 0, [1, 2]), (8, 4, 2, [2]), (16, 4, 0, [4, 8, 1, 2])],
)
def test_neighbors_are_on_other_nodes_if_there_are_any(
    world: int, node: int, jump: int, distances: list[int]
) -> None:
    assert NeighborMemory(jump=jump).distances(world, node) == distances


def test_ranks_that_cannot_be_divided_are_told_what_is_possible() -> None:
    with pytest.raises(
        ValueError, match=r"neighbor memory: 12 ranks cannot keep a copy each, 4 ranks apart: .* = 8"
    ):
        NeighborMemory().distances(12, 4)
    with pytest.raises(ValueError, match="1 ranks cannot keep a copy each"):
        NeighborMemory().distances(1, 1)
    with pytest.raises(ValueError, match="cannot keep 2 copies each"):
        LocalDirectory("x", copies=2).distances(4, 3)


def test_tiers_of_a_recipe_are_made_by_name(tmp_path: Path) -> None:
    settings = {"neighbor_memory": None, "shared_directory": {"path": str(tmp_path), "every": 5}}
    tiers = make_tiers(settings)
    assert [(type(each), each.every) for each in tiers] == [
        (NeighborMemory, NeighborMemory().every),
        (SharedDirectory, 5),
    ]
    (own,) = make_tiers({"checkpointless.recovery.NeighborMemory": {"every": 2}})
    assert own.every == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"neighbor": {}}, "no tier is called neighbor: use neighbor_memory, local_directory, shared_directory"),
        ({"os.path.join": {}}, "no tier is called os.path.join"),
        ({"nowhere.Tier": {}}, "no tier is called nowhere.Tier"),
        ({"local_directory": {}}, "tier local_directory: missing 1 required positional argument: 'path'"),
        ({"neighbor_memory": {"evry": 1}}, "tier neighbor_memory: got an unexpected keyword argument 'evry'"),
        ({"neighbor_memory": {"every": 0}}, "tier neighbor_memory: a tier needs every >= 1"),
    ],
)
def test_what_cannot_be_made_is_said_in_one_line(settings: dict[str, dict[str, int]], message: str) -> None:
    with pytest.raises(ValueError, match="tier") as raised:
        make_tiers(settings)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_each_tier_is_given_once_and_the_cheapest_is_asked_first(tmp_path: Path) -> None:
    given = [SharedDirectory(tmp_path), NeighborMemory(), LocalDirectory(tmp_path)]
    assert [tier.name for tier in Copies(given).tiers] == [kind.name for kind in TIERS.values()]
    with pytest.raises(ValueError, match="each tier can be given once"):
        CheckpointManager(tiers=[NeighborMemory(), NeighborMemory(every=2)])


def test_a_folder_that_was_purged_is_made_again_at_the_next_copy(tmp_path: Path) -> None:
    store = SharedDirectory(tmp_path / "shared").open("abc", 3)
    assert isinstance(store, DirectoryStore)
    shutil.rmtree(tmp_path / "shared")
    store.write(Part.sealed(PartId(SaveId(1, "0" * 24), 3), 4, Content.of({})), 3)
    assert stat.filemode(store.root.stat().st_mode) == "drwx------"


def test_the_folders_of_a_job_that_has_ended_are_removed(tmp_path: Path) -> None:
    for tier in (LocalDirectory(tmp_path / "local"), SharedDirectory(tmp_path / "shared")):
        tier.clear(tier.open("abc", 3))
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "local", tmp_path / "shared"]


# --- Copies of a step are of this training only if no later generation has made the step again --------------------

JOB = "0123456789abcdef"
FIRST = _Lineage(JOB).begin(0, 0)


def named(step: int, generation: int) -> SaveId:
    return SaveId(step, f"{JOB}{generation:08x}")


def test_what_was_made_before_all_that_is_known_has_no_name() -> None:
    lineage = FIRST
    for generation in range(1, 400):
        lineage = lineage.begin(generation, generation)
    assert lineage.save(400) == named(400, 399)
    assert lineage.save(1) is None, "it is not known any more whether another generation made it again"
    assert len(lineage.begun) == 256


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_it_names_what_a_list_of_all_steps_names(generations: list[tuple[int, int]]) -> None:
    """Each generation goes back by some steps, and makes some."""
    lineage = _Lineage(JOB)
    made: list[int] = []  # the generation that made each step
    for generation, (back, forth) in enumerate(generations):
        del made[max(0, len(made) - back) :]
        lineage = lineage.begin(generation, len(made))
        made += [generation] * forth
        for step, maker in enumerate(made, start=1):
            assert lineage.save(step) == named(step, maker)
            assert lineage.has(named(step, maker))
            assert not any(lineage.has(named(step, other)) for other in range(generation + 1) if other != maker)


def test_it_travels_as_plain_data() -> None:
    lineage = FIRST.begin(1, 4)
    told = json.loads(json.dumps(msgspec.to_builtins(lineage)))
    assert msgspec.convert(told, _Lineage) == lineage
    assert (lineage.newest, _Lineage(JOB).newest) == (1, -1)


@pytest.mark.parametrize("plain", [None, "job", ["short", []], [JOB, [[1]]], [JOB, [["a", "b"]]]])
def test_anything_else_is_refused(plain: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(plain, _Lineage)
