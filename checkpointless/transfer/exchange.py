"""Plain messages between ranks: JSON and bytes, never pickle, in chunks, so that no announced size is trusted.

On the CPU, gloo's messages are launched one by one, and waiting for one blocks the host. Another wire (NCCL) *runs
ahead*: waiting for a message only orders what this rank launches afterwards on the device. So memory that was sent,
or received into, may be used again at once, but by what is launched after the wait alone, and not by the host.
Messages that are launched together are one batch, on the communicator of the group, which every recovery has used
before for a collective of all ranks, as torch demands; one outside of a batch would have torch make a communicator
for its pair.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from checkpointless.launcher.protocol.causes import Json, Parsed


#: A message: ``dist.isend`` or ``dist.irecv``; its bytes, or the memory to receive them into; and the peer.
Message: TypeAlias = tuple[Callable[..., Any], torch.Tensor, int]


def wire_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device on which ``group`` moves tensors: this rank's GPU if NCCL does, also next to gloo."""
    if "cuda:nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def runs_ahead() -> bool:
    """Return whether the wire of the default group runs ahead. It does on all ranks, or on none."""
    return wire_device().type != "cpu"


def launch(messages: Sequence[Message]) -> list[dist.Work]:
    """Launch messages of the default group, as one batch if the wire runs ahead, and return what to wait for."""
    if runs_ahead():
        return cast("list[dist.Work]", dist.batch_isend_irecv([dist.P2POp(*each) for each in messages]))
    return [function(tensor, peer) for function, tensor, peer in messages]


def exchange(messages: Sequence[Message]) -> None:
    """Send and receive messages of the default group, and wait as the wire has it."""
    for work in launch(messages):
        work.wait()


MAX_BYTES = 64 * 1024 * 1024  # limit of a message that every rank gets from every other
MAX_MESSAGE_BYTES = 2 * 1024 * 1024 * 1024 + 8 * 1024 * 1024  # between two ranks: the skeleton of a state fits
CHUNK_BYTES = 4 * 1024 * 1024
GATHERED_BYTES = 256 * 1024  # bytes of each rank per all-gather


def true_on_all(mine: bool) -> bool:
    """Return whether ``mine`` is true on every rank. Collective."""
    flag = torch.tensor([int(mine)], dtype=torch.int64, device=wire_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def all_gather_json(message: Json, group: dist.ProcessGroup | None = None) -> list[Parsed]:
    """Gather every rank's ``message``, of at most 64 MiB, on every rank, in rank order. Collective."""
    device = wire_device(group)
    mine = json.dumps(message, separators=(",", ":")).encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(mine)], dtype=torch.int64, device=device), group=group)
    lengths = [int(size.item()) for size in sizes]
    if max(lengths) > MAX_BYTES:
        raise ValueError(f"a message of {max(lengths)} bytes is over {MAX_BYTES}")
    texts = [bytearray() for _ in lengths]
    for start in range(0, max(lengths), GATHERED_BYTES):
        chunk = mine[start : start + GATHERED_BYTES]
        padded = torch.zeros(min(GATHERED_BYTES, max(lengths) - start), dtype=torch.uint8, device=device)
        if chunk:
            padded[: len(chunk)] = to_tensor(chunk, device)
        gathered = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(gathered, padded, group=group)
        for text, each, length in zip(texts, gathered, lengths):
            text += to_bytes(each[: max(0, length - start)])
    return [json.loads(text) for text in texts]


def send_bytes(data: bytes, destination: int) -> None:
    """Send ``data``, of 1 to :data:`MAX_MESSAGE_BYTES` bytes, to a global rank, its length first."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes is over {MAX_MESSAGE_BYTES}")
    device, view = wire_device(), memoryview(data)
    exchange([(dist.isend, torch.tensor([len(data)]).to(device), destination)])
    for start in range(0, len(data), CHUNK_BYTES):
        exchange([(dist.isend, to_tensor(view[start : start + CHUNK_BYTES], device), destination)])


def receive_bytes(source: int) -> bytes:
    """Receive from :func:`send_bytes`, taking memory as it arrives; ``ValueError`` if it is too large."""
    device = wire_device()
    size = torch.zeros(1, dtype=torch.int64, device=device)
    exchange([(dist.irecv, size, source)])
    length = int(size.item())
    if not 0 < length <= MAX_MESSAGE_BYTES:
        raise ValueError(f"rank {source} announced a message of {length} bytes; the limit is {MAX_MESSAGE_BYTES}")
    chunks = []
    chunk = torch.empty(min(length, CHUNK_BYTES), dtype=torch.uint8, device=device)
    for start in range(0, length, CHUNK_BYTES):
        part = chunk[: min(CHUNK_BYTES, length - start)]
        exchange([(dist.irecv, part, source)])
        chunks.append(to_bytes(part))
    return b"".join(chunks)


def to_tensor(data: bytes | memoryview, device: torch.device) -> torch.Tensor:
    """Return ``data`` as flat uint8 on ``device``; a GPU's copy is launched, which has read unpinned memory."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device, non_blocking=True)


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
