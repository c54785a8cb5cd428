"""Test names, parts, identities and registration, without ranks.

By hand with another Megatron-core, which is not installed beside NeMo:

    pip install --no-deps --target /tmp/mc16 'megatron-core==0.16.*'
    PYTHONPATH=/tmp/mc16 python -m pytest tests/unit/megatron/dist_checkpoint
"""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("megatron.core.dist_checkpointing.strategies.base", reason="gone from Megatron-core 0.19")

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.base import (
    StrategyAction,
    get_default_strategy,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from checkpointless.integrations.megatron.dist_checkpoint.strategies import (
    FILE,
    _Chunk,
    _content_of,
    _decoded,
    _encoded,
    _Identity,
    _name_of,
    _read_identity,
    _values_of,
    _values_to_keep,
    _write_identity,
)
from checkpointless.megatron.dist_checkpoint import (
    Copies,
    CopiesLoadStrategy,
    CopiesSaveStrategy,
    are_defaults,
    register,
    unregister,
)
from checkpointless.replication.parts import PartError, SaveId

pytestmark = pytest.mark.nemo
SAVES = [SaveId(number, f"{number:024x}") for number in range(4)]
IDENTITY = _Identity(str(SAVES[1]), "run/weights", 4)


def leaves() -> list[ShardedTensor | ShardedObject]:
    """Return leaves of different kinds."""
    return [
        ShardedTensor.from_rank_offsets("weight", torch.randn(4, 3), (0, 1, 2), replica_id=(0, 0, 1)),
        ShardedTensor.from_rank_offsets("layers", torch.randn(5).bfloat16(), (0, 1, 2), prepend_axis_num=1),
        ShardedObject("extra", io.BytesIO(b"state"), (1,), (0,)),
        ShardedObject("plain", {"seed": 3, "at": torch.ones(2)}, (2,), (1,)),
        ShardedObject("opaque", object(), (1,), (0,)),
    ]


def test_replicas_have_one_name_and_different_chunks_have_different_ones() -> None:
    chunks = [_Chunk.of(leaf) for leaf in leaves()]
    assert chunks == [_Chunk.of(replace(leaf, replica_id=7)) for leaf in leaves()]
    assert [msgspec.json.decode(msgspec.json.encode(each), type=_Chunk) for each in chunks] == chunks
    others = [
        msgspec.structs.replace(chunks[0], global_offset=(0, 0)),
        msgspec.structs.replace(chunks[0], dtype="float64"),
    ]
    assert len({each.id for each in [*chunks, *others]}) == len(chunks) + 2


def test_a_part_gives_back_what_can_be_kept() -> None:
    given_ = leaves()
    values = _values_of(_content_of(IDENTITY, _values_to_keep(given_)), IDENTITY)
    weight, layers, extra, plain, opaque = (values.get(_Chunk.of(leaf).id, {}) for leaf in given_)
    assert torch.equal(weight, given_[0].data)
    assert torch.equal(layers, given_[1].data)
    assert _decoded(extra).getvalue() == b"state"
    assert _decoded(plain)["seed"] == 3
    assert opaque == {}
    assert _encoded(object()) is None


@pytest.mark.parametrize("other", [{"token": str(SAVES[2])}, {"name": "other/weights"}, {"world_size": 2}])
def test_a_part_of_another_checkpoint_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(PartError, match="is of the checkpoint"):
        _values_of(_content_of(IDENTITY, _values_to_keep(leaves())), msgspec.structs.replace(IDENTITY, **other))


def test_an_identity_holds_as_long_as_the_checkpoint_is_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "weights"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"metadata")
    assert _read_identity(folder) is None
    identity = msgspec.structs.replace(IDENTITY, name=_name_of(folder))
    _write_identity(identity, folder)
    assert _read_identity(folder) == identity
    moved = folder.rename(tmp_path / "weights")
    assert _read_identity(moved) is None
    moved.rename(folder)
    os.utime(folder / ".metadata", (1, 1))
    assert _read_identity(folder) is None
    (folder / FILE).write_text("[]")
    assert _read_identity(folder) is None
    assert _read_identity("msc://bucket/weights") is None


def test_they_are_registered_and_unregistered() -> None:
    copies = Copies()
    try:
        register(Copies())
        register(copies)
        for _ in range(2):  # Megatron registers its own again at each look-up
            load = get_default_strategy(StrategyAction.LOAD_SHARDED, "torch_dist", 1)
            save = get_default_save_sharded_strategy()
            assert isinstance(load, CopiesLoadStrategy)
            assert isinstance(save, CopiesSaveStrategy)
            assert load.copies is save.copies is copies
            assert are_defaults()
    finally:
        unregister()
    assert type(get_default_save_sharded_strategy()) is TorchDistSaveShardedStrategy
    assert not are_defaults()
