"""The wire between ranks: the device on which messages are sent and received, and how they are launched.

On the CPU, gloo's messages are launched one by one, and waiting for one blocks the host.

Another wire (NCCL) *runs ahead*: launches return before anything is done, and waiting for a message only orders
what this rank launches afterwards on the device. So memory that was sent, or received into, may be used again at
once, but by what is launched after the wait alone, and not by the host. Messages that are launched together are one
batch. A batch uses the communicator of the group, which every recovery has used before for a collective of all
ranks, as torch demands; a message that is launched alone, outside of a batch, would have torch make a communicator
for its pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Message:
    """A message that is sent, or received.

    Attributes:
        tensor: the bytes, or the memory to receive them into.
        peer: the global rank at the other end.
        is_sent: whether this rank sends it.
    """

    tensor: torch.Tensor
    peer: int
    is_sent: bool


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
        operations = [dist.P2POp(_function(each), each.tensor, each.peer) for each in messages]
        return cast("list[dist.Work]", dist.batch_isend_irecv(operations))
    return [cast("dist.Work", _function(each)(each.tensor, each.peer)) for each in messages]


def send(tensor: torch.Tensor, destination: int) -> None:
    """Send one tensor to a global rank, and wait as the wire has it."""
    _exchange(Message(tensor, destination, is_sent=True))


def receive(tensor: torch.Tensor, source: int) -> None:
    """Receive one tensor from a global rank, and wait as the wire has it."""
    _exchange(Message(tensor, source, is_sent=False))


def _exchange(message: Message) -> None:
    for work in launch([message]):
        work.wait()


def _function(message: Message) -> Callable[[torch.Tensor, int], dist.Work | None]:
    return dist.isend if message.is_sent else dist.irecv
