"""Test names, parts, identities and registration, and who sends what to whom, without ranks."""

from __future__ import annotations

import io
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core.dist_checkpointing.strategies.base", reason="gone from Megatron-core 0.19")

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from checkpointless.integrations.megatron.dist_checkpoint import strategies
from checkpointless.megatron import dist_checkpoint
from checkpointless.megatron.dist_checkpoint import Copies
from checkpointless.replication.parts import PartError, SaveId

pytestmark = pytest.mark.nemo  # the folder of the code imports Megatron-core

SAVES = [SaveId(number, f"{number:024x}") for number in range(4)]
IDENTITY = strategies._Identity(str(SAVES[1]), "run/weights", 4)


def leaves() -> list[ShardedTensor | ShardedObject]:
    return [
        ShardedTensor.from_rank_offsets("weight", torch.randn(4, 3), (0, 1, 2), replica_id=(0, 0, 1)),
        ShardedTensor.from_rank_offsets("layers", torch.randn(5).bfloat16(), (0, 1, 2), prepend_axis_num=1),
        ShardedObject("extra", io.BytesIO(b"state"), (1,), (0,)),
        ShardedObject("plain", {"seed": 3, "at": torch.ones(2)}, (2,), (1,)),
        ShardedObject("opaque", object(), (1,), (0,)),
    ]


def test_replicas_have_one_name_and_different_chunks_have_different_ones() -> None:
    chunks = [strategies._Chunk.of(leaf) for leaf in leaves()]
    assert chunks == [strategies._Chunk.of(replace(leaf, replica_id=7)) for leaf in leaves()]
    assert [msgspec.json.decode(msgspec.json.encode(each), type=strategies._Chunk) for each in chunks] == chunks
    read = [msgspec.json.decode(msgspec.json.encode(chunks[at])) for at in (0, 2)]
    assert read[0] == ["tensor", "weight", [8, 3], [4, 0], [4, 3], None, "float32"]  # as copies on disks have it
    assert read[1] == ["object", "extra", [1], [0], [], None, ""]
    changes: list[dict[str, Any]] = [{"global_offset": (0, 0)}, {"dtype": "float64"}]
    others = [msgspec.structs.replace(chunks[0], **change) for change in changes]
    assert len({each.id for each in [*chunks, *others]}) == len(chunks) + 2


def test_a_part_gives_back_what_can_be_kept() -> None:
    given_ = leaves()
    values = strategies._values_of(strategies._content_of(IDENTITY, strategies._values_to_keep(given_)), IDENTITY)
    weight, layers, extra, plain, opaque = (values.get(strategies._Chunk.of(leaf).id, {}) for leaf in given_)
    assert all(map(torch.equal, (weight, layers), (given_[0].data, given_[1].data)))
    assert (strategies._decoded(extra).getvalue(), strategies._decoded(plain)["seed"], opaque) == (b"state", 3, {})
    assert strategies._encoded(object()) is None


@pytest.mark.parametrize("other", [{"token": str(SAVES[2])}, {"name": "other/weights"}, {"world_size": 2}])
def test_a_part_of_another_checkpoint_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(PartError, match="is of the checkpoint"):
        strategies._values_of(
            strategies._content_of(IDENTITY, strategies._values_to_keep(leaves())),
            msgspec.structs.replace(IDENTITY, **other),
        )


def test_an_identity_holds_as_long_as_the_checkpoint_is_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "weights"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"metadata")
    assert strategies._read_identity(folder) is None
    identity = msgspec.structs.replace(IDENTITY, name=strategies._name_of(folder))
    strategies._write_identity(identity, folder)
    assert strategies._read_identity(folder) == identity
    moved = folder.rename(tmp_path / "weights")
    assert strategies._read_identity(moved) is None
    moved.rename(folder)
    os.utime(folder / ".metadata", (1, 1))
    assert strategies._read_identity(folder) is None
    (folder / strategies.FILE).write_text("[]")
    assert strategies._read_identity(folder) is None
    assert strategies._read_identity("msc://bucket/weights") is None


def test_they_are_registered_and_unregistered() -> None:
    copies = Copies()
    try:
        dist_checkpoint.register(Copies())
        dist_checkpoint.register(copies)
        for _ in range(2):  # Megatron registers its own again at each look-up
            load = get_default_strategy(StrategyAction.LOAD_SHARDED, "torch_dist", 1)
            save = get_default_save_sharded_strategy()
            assert (type(load), type(save)) == (
                dist_checkpoint.CopiesLoadStrategy,
                dist_checkpoint.CopiesSaveStrategy,
            )
            assert load.copies is save.copies is copies  # type: ignore[attr-defined]
            assert dist_checkpoint.are_defaults()
    finally:
        dist_checkpoint.unregister()
    assert type(get_default_save_sharded_strategy()) is TorchDistSaveShardedStrategy
    assert not dist_checkpoint.are_defaults()


# --- Everything is read and sent once, evenly, and many pairs work at a time --------------------------------------

WORLD = 6
CHUNKS = [f"chunk {number}" for number in range(20)]
wishes = st.lists(st.sets(st.sampled_from(CHUNKS)), min_size=WORLD, max_size=WORLD)
sizes = st.lists(st.integers(0, 1000), min_size=20, max_size=20)


@given(wishes, sizes, st.lists(st.integers(0, WORLD - 1), min_size=20, max_size=20))
def test_each_chunk_is_read_and_sent_once(wishes: list[set[str]], sizes: list[int], sources: list[int]) -> None:
    about, source_of = dict(zip(CHUNKS, sizes)), dict(zip(CHUNKS, sources))
    needs = strategies._needs_of([{id_: about[id_] for id_ in each} for each in wishes])
    readers = strategies._readers_of(needs)
    assert readers.keys() == needs.keys() == set().union(*wishes)
    assert all(id_ in wishes[rank] for id_, rank in readers.items())
    known = {id_: source_of[id_] for id_ in needs}
    sent = Counter(
        (each.destination, id_) for each in strategies._deliveries_of(known, needs, WORLD) for id_ in each.names
    )
    wanted = {(rank, id_) for rank, each in enumerate(wishes) for id_ in each if source_of[id_] != rank}
    assert sent == Counter(wanted)


@given(sizes)
def test_what_all_need_is_read_evenly(sizes: list[int]) -> None:
    readers = strategies._readers_of(
        {id_: strategies._Need(size, [*range(WORLD)]) for id_, size in zip(CHUNKS, sizes)}
    )
    load = Counter({rank: 0 for rank in range(WORLD)})
    for id_, size in zip(CHUNKS, sizes):
        load[readers[id_]] += max(1, size)
    assert max(load.values()) - min(load.values()) <= max(1, *sizes)


@pytest.mark.parametrize("world", [2, 3, 4, 8, 64])
def test_when_all_send_to_all_many_pairs_work_at_the_same_time(world: int) -> None:
    needs = {str(rank): strategies._Need(1, [*range(world)]) for rank in range(world)}
    free = [0] * world  # by rank, when it has made its deliveries so far
    for each in strategies._deliveries_of({str(rank): rank for rank in range(world)}, needs, world):
        free[each.source] = free[each.destination] = max(free[each.source], free[each.destination]) + 1
    assert max(free) <= 2 * world  # each rank sends to and receives from every other one
