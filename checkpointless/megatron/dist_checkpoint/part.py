"""What a rank writes to a checkpoint, as the content of a part that a place can keep; and back."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import msgspec
import torch

from checkpointless.megatron.dist_checkpoint.chunk import Chunk, Kind, Leaf
from checkpointless.megatron.dist_checkpoint.identity import Identity
from checkpointless.replication.parts import Content, PartError
from checkpointless.serialization.state_tree import Tree

_PLAIN = "plain"
_STREAM = "stream"  # TransformerEngine's extra state, which only it reads


def values_to_keep(leaves: Sequence[Leaf]) -> list[tuple[Leaf, Tree]]:
    """Return the leaves that can be kept, each with its tensor or its object as :func:`encoded` made it.

    A tensor of a special class (one in FP8), and an object that is not made of plain values, are left out: they
    will be loaded from storage.

    Args:
        leaves: what this rank writes, with its data.
    """
    kept = []
    for leaf in leaves:
        value = encoded(leaf.data) if not isinstance(leaf.data, torch.Tensor) else leaf.data
        if value is not None and (not isinstance(value, torch.Tensor) or can_keep(value)):
            kept.append((leaf, value))
    return kept


def content_of(identity: Identity, kept: Sequence[tuple[Leaf, Tree]]) -> Content:
    """Return a part, whose tensors are referenced and not copied.

    Args:
        identity: of the checkpoint.
        kept: what :func:`values_to_keep` returned.
    """
    about = msgspec.msgpack.encode((identity, [Chunk.of(leaf) for leaf, _ in kept]))
    return Content.of({"about": about, "values": [value for _, value in kept]})


def values_of(content: Content, identity: Identity) -> dict[str, Tree]:
    """Return what a part has, by the ids of the chunks: tensors, and objects as :func:`encoded` made them.

    Raises:
        PartError: the part is of another checkpoint, or is no such part.
    """
    try:
        state = content.state()
        theirs, chunks = msgspec.msgpack.decode(state["about"], type=tuple[Identity, list[Chunk]])
        values = dict(zip([each.id for each in chunks], state["values"], strict=True))
    except (ValueError, KeyError, TypeError) as error:
        raise PartError(f"a part of {identity.save} is no part of a torch_dist checkpoint: {error}") from error
    if theirs != identity:
        raise PartError(f"a part is of the checkpoint {theirs.name} ({theirs.save}), not of {identity.name}")
    for chunk in chunks:
        if chunk.kind is Kind.TENSOR and not chunk.fits(values[chunk.id]):
            raise PartError(f"{chunk.words} is not what a part of {identity.save} says")
    return values


def can_keep(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain memory, which can be copied bit by bit."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided


def encoded(value: object) -> Tree | None:
    """Return an object as plain values that can be kept and sent; None if it is not made of plain values.

    Tensors in it are copied into host memory.
    """
    if type(value) is io.BytesIO:
        return {_STREAM: value.getvalue(), "at": value.tell()}
    try:
        return Content.of({_PLAIN: value}).on_host(copy=True).state()
    except (TypeError, ValueError):  # StateTreeError is one of them
        return None


def decoded(tree: Mapping[str, Tree]) -> Tree:
    """Return the object that :func:`encoded` encoded, which shares no memory with it.

    Raises:
        ValueError: it is no such encoding.
    """
    if _STREAM in tree:
        stream = io.BytesIO(tree[_STREAM])
        stream.seek(tree["at"])
        return stream
    if _PLAIN not in tree:
        raise ValueError("an object was not encoded as it should be")
    return Content.of(tree[_PLAIN]).on_host(copy=True).state()
