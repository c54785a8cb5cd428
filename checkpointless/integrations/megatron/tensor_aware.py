"""Megatron-core's tensor-aware state as plain values and tensors, so that it can be stored without being pickled.

``MCoreTensorAwareStateDict`` has the common state, and the sharded state with ``ShardedTensor`` and
``ShardedObject`` as its leaves (Megatron-core's ``dist_checkpointing/tensor_aware_state_dict.py`` and
``mapping.py``).
"""

from __future__ import annotations

import dataclasses
import io
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict

from checkpointless.replication.tensor_aware import register_form
from checkpointless.state.serialization.state_tree import StateTreeError, Tree

_DEVICE = "orig_device"  # where a tensor was that is in host memory now, as Megatron-core notes it
_LEAVES = {"tensor": ShardedTensor, "object": ShardedObject}


def _taken_apart(state: MCoreTensorAwareStateDict) -> Tree:
    leaves: list[Tree] = []
    sharded = _without_leaves(state.sharded_state_dict, leaves, "sharded_state_dict")
    return {"common": state.common, "sharded": sharded, "leaves": leaves}


def _put_together(tree: Tree) -> MCoreTensorAwareStateDict:
    try:
        leaves = [_leaf(each) for each in tree["leaves"]]
        sharded = _with_leaves(tree["sharded"], leaves)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"a sharded state that this Megatron-core does not know: {error!r}") from error
    return MCoreTensorAwareStateDict(common=tree["common"], sharded_state_dict=sharded)


def _without_leaves(value: Any, leaves: list[Tree], path: str) -> Tree:
    if isinstance(value, dict):
        return {key: _without_leaves(item, leaves, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list):
        return [_without_leaves(item, leaves, f"{path}[{index}]") for index, item in enumerate(value)]
    for name, kind in _LEAVES.items():
        if type(value) is kind:
            leaves.append(_plain(name, value))
            return len(leaves) - 1
    raise StateTreeError(f"{path} is a {type(value).__module__}.{type(value).__qualname__}: not a sharded leaf")


def _with_leaves(tree: Tree, leaves: list[Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _with_leaves(item, leaves) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_with_leaves(item, leaves) for item in tree]
    return leaves[tree]


def _plain(name: str, leaf: Any) -> Tree:
    """Return a leaf as a dict of its fields and its tensor's device; Megatron raises if they do not match."""
    leaf.validate_metadata_integrity()
    fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    plain: dict[str, Tree] = {"leaf": name, "fields": fields}
    if name == "tensor" and leaf.data is not None:
        plain["device"] = getattr(leaf, _DEVICE, leaf.data.device.type)
    if type(leaf.data) is io.BytesIO:  # TransformerEngine's extra state, which only it reads
        fields["data"], plain["stream"] = leaf.data.getvalue(), leaf.data.tell()
    return plain


def _leaf(plain: Tree) -> ShardedTensor | ShardedObject:
    fields = dict(plain["fields"])
    if "stream" in plain:
        fields["data"] = io.BytesIO(fields["data"])
        fields["data"].seek(plain["stream"])
    made = _LEAVES[plain["leaf"]](**fields)
    if "device" in plain and plain["device"] != made.data.device.type:
        setattr(made, _DEVICE, plain["device"])
    return made


register_form(MCoreTensorAwareStateDict, _taken_apart, _put_together)
