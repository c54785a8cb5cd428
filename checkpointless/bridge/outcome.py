"""The outcome of a step whose update is applied, with which Megatron-Bridge can go through the rest of it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Losses = Sequence[Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class StepOutcome:
    """What forward, backward and update of one step gave this rank.

    Attributes:
        losses: for each microbatch the values to report, by name, each of one or two elements; empty on a rank
            that is not in the last pipeline stage.
        succeeded: whether the update was not skipped.
        grad_norm: norm of all gradients, if it was computed.
        num_zeros: number of gradients that are zero, if they were counted.
        samples: number of samples that the step took, of all ranks.
    """

    losses: Losses
    succeeded: bool
    grad_norm: float | None
    num_zeros: float | None
    samples: int

    def to_plain(self) -> dict[str, Any]:
        """Return the outcome as plain data, with one tensor for each name."""
        names = list(self.losses[0]) if self.losses else []
        stacked = {name: torch.stack([each[name].detach().view(-1) for each in self.losses]) for name in names}
        return {
            "losses": {name: (tensor.device.type, tensor.cpu()) for name, tensor in stacked.items()},
            "succeeded": self.succeeded,
            "grad_norm": self.grad_norm,
            "num_zeros": self.num_zeros,
            "samples": self.samples,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> StepOutcome:
        """Return the outcome that :meth:`to_plain` gave."""
        stacked = {name: tensor.to(device) for name, (device, tensor) in plain["losses"].items()}
        microbatches = len(next(iter(stacked.values()))) if stacked else 0
        losses = [{name: tensor[number] for name, tensor in stacked.items()} for number in range(microbatches)]
        rest = {name: value for name, value in plain.items() if name != "losses"}
        return cls(losses, **rest)
