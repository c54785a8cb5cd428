"""What an update that is to be made again needs of the parameters and the optimizers that stay built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from checkpointless.recovery.training.param_groups import ParamGroups
from checkpointless.transfer.module_tensors import put_values


class InterruptedUpdate:
    """Gradients, what is trained, and the values of param groups, as an interrupted step has left them.

    The script is given parameters without gradients and param groups as they were built; the update that is made
    again is given these.

    Args:
        parameters: the parameters that stay built.
        optimizers: their optimizers.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._parameters = [(each, each.grad, each.requires_grad) for each in parameters]
        self._optimizers = list(optimizers)
        self._groups = ParamGroups(self._optimizers).take()

    def put_back(self) -> None:
        """Put all of it back."""
        for parameter, grad, is_trained in self._parameters:
            parameter.requires_grad_(is_trained)
            parameter.grad = grad
        for optimizer, groups in zip(self._optimizers, self._groups()):
            for group, values in zip(optimizer.param_groups, groups):
                put_values(group, values)

    def clear(self) -> None:
        """Clear the gradients, which have been applied."""
        for parameter, _, _ in self._parameters:
            parameter.grad = None
        self._parameters = []
