"""A part on its way from the ranks that have it to one that wants it, with a digest of each bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from checkpointless.local_checkpoint.content import Content
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import Fill, receive_state, send_state


def send_part(content: Content, id_: str, fills: Sequence[Fill]) -> None:
    """Send a part to other ranks, or this holder's share of it.

    Args:
        content: the part.
        id_: its name.
        fills: the ranks that want it.

    Raises:
        TransferError: a rank asks for what does not exist.
    """
    tensors: dict[Key, torch.Tensor] = {(index,): tensor for index, tensor in enumerate(content.tensors)}
    send_state(tensors, {"id": id_, "form": content.form, "structure": content.structure}, fills)


def receive_part(holders: Sequence[int], device: torch.device) -> tuple[Content, str]:
    """Receive a part, of which each holder sends a share, and its name.

    Args:
        holders: the global ranks that have it.
        device: where its tensors are put.

    Raises:
        TransferError: the part arrived damaged and could not be mended.
    """
    room: dict[Key, torch.Tensor] = {}

    def allocate(entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
        for entry in entries:
            room[entry.key] = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        return room

    about, _ = receive_state(holders, allocate)
    return Content(about["structure"], tuple(room.values()), about["form"]), about["id"]
