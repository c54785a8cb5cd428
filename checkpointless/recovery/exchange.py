"""Small plain messages between all ranks of a process group: JSON, never pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

MAX_BYTES = 64 * 1024 * 1024


def wire_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device on which ``group`` moves tensors."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_gather_json(message: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``message``, in rank order. Collective.

    Raises:
        ValueError: a message is larger than 64 MiB.
    """
    device = wire_device(group)
    mine = to_tensor(json.dumps(message, separators=(",", ":")).encode(), device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([mine.numel()], dtype=torch.int64, device=device), group=group)
    lengths = [int(size.item()) for size in sizes]
    if max(lengths) > MAX_BYTES:
        raise ValueError(f"a message of {max(lengths)} bytes is over {MAX_BYTES}")
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    return [json.loads(to_bytes(each[:length])) for each, length in zip(gathered, lengths)]


def send_bytes(data: bytes, destination: int) -> None:
    """Send ``data`` to the global rank ``destination``, length first."""
    device = wire_device()
    dist.send(torch.tensor([len(data)], dtype=torch.int64, device=device), destination)
    dist.send(to_tensor(data, device), destination)


def receive_bytes(source: int) -> bytes:
    """Receive what :func:`send_bytes` sent from the global rank ``source``.

    Raises:
        ValueError: it claims to be larger than 64 MiB.
    """
    device = wire_device()
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, source)
    length = int(size.item())
    if not 0 < length <= MAX_BYTES:
        raise ValueError(f"rank {source} announced a message of {length} bytes; the limit is {MAX_BYTES}")
    data = torch.empty(length, dtype=torch.uint8, device=device)
    dist.recv(data, source)
    return to_bytes(data)


def to_tensor(data: bytes, device: torch.device) -> torch.Tensor:
    """``data`` as a uint8 tensor of shape ``(len(data),)``."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a flat uint8 tensor."""
    return tensor.cpu().numpy().tobytes()
