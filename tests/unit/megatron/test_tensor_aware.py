"""Test that tensor-aware states and requests are those of the frameworks, and come back without being pickled."""

from __future__ import annotations

import io
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest as MegatronsRequest
from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local import basic_state_dict as nvrx

from checkpointless.replication.local_checkpoint import LocalCheckpointManager
from checkpointless.replication.tensor_aware import content_of, state_of
from tests.ranks.local_checkpoint_ranks import bits

pytestmark = pytest.mark.nemo


sharded = ShardedTensor.from_rank_offsets


def made() -> MCoreTensorAwareStateDict:
    if hasattr(ShardedTensor, "from_rank_offsets_flat"):
        given = "optimizer", torch.arange(3.0), (2, 4), (0, 1, 2)
        flat = ShardedTensor.from_rank_offsets_flat(*given, flattened_range=slice(2, 5))
    else:  # Megatron-core 0.16 has no flattened ranges
        flat = sharded("optimizer", torch.arange(3.0), (0, 1, 2))
    elsewhere = sharded("elsewhere", torch.ones(2), (0, 0, 2))
    elsewhere.data = None  # another rank saves it
    return MCoreTensorAwareStateDict(
        common={"iteration": 5, "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}], "rng": torch.arange(4)},
        sharded_state_dict={
            "model": {
                "weight": sharded("weight", torch.randn(4, 3), (0, 1, 2), replica_id=(0, 0, 1)),
                "half": sharded("half", torch.randn(5).bfloat16(), prepend_axis_num=0),
                "elsewhere": elsewhere,
            },
            "optimizer": [flat],
            "extra": ShardedObject("extra", io.BytesIO(b"bytes of TransformerEngine's"), (1,), (0,)),
            "plain": ShardedObject("plain", {"seed": 3, "state": torch.ones(2)}, (1,), (0,), replica_id=2),
        },
    )


def leaves(state: MCoreTensorAwareStateDict) -> list[Any]:
    sharded = state.sharded_state_dict
    return [*sharded["model"].values(), *sharded["optimizer"], sharded["extra"], sharded["plain"]]


def told(leaf: Any) -> list[Any]:
    values = {field.name: getattr(leaf, field.name) for field in fields(leaf)}
    if isinstance(leaf.data, io.BytesIO):
        values["data"] = leaf.data.getvalue()
    return [type(leaf), bits(values)]


def test_all_leaves_come_back(tmp_path: Path) -> None:
    manager, given = LocalCheckpointManager(tmp_path), made()
    before = [told(leaf) for leaf in leaves(given)]
    manager.save(given, 5)
    assert [told(leaf) for leaf in leaves(given)] == before
    loaded, _ = manager.load()
    assert (type(loaded), loaded.is_hollow) == (MCoreTensorAwareStateDict, False)
    assert bits(loaded.common) == bits(given.common)
    assert [told(leaf) for leaf in leaves(loaded)] == before
    assert bits(list(loaded.tensors)) == bits(list(given.tensors))
    assert list(loaded.sharded_state_dict) == list(given.sharded_state_dict)


def test_a_request_is_like_those_of_the_frameworks(tmp_path: Path) -> None:
    manager = LocalCheckpointManager(tmp_path)
    request = manager.save({}, 1, is_async=True)
    assert request is not None
    assert request._fields == MegatronsRequest._fields
    ended = []
    request.add_finalize_fn(lambda: ended.append(manager.find_latest()))
    frozen = request.freeze()
    with pytest.raises(RuntimeError, match="nothing can be added"):
        frozen.add_finalize_fn(print)
    frozen.execute_sync()
    assert ended == [1]


def test_a_state_of_nvrx_stays_one_of_nvrx() -> None:
    given = object.__new__(nvrx.BasicTensorAwareStateDict)  # its constructor wants a GPU
    given.state_dict, given._is_hollow = {"a": torch.ones(3)}, False
    made = state_of(content_of(given))
    assert (type(made), made.is_hollow) == (nvrx.BasicTensorAwareStateDict, False)
    assert bits(made.state_dict) == bits({"a": torch.ones(3)})
