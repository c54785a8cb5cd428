"""The random streams at the entry of the block, which are the same at every entry.

A process that re-enters its block has drawn from streams that were seeded before the block, at the top of the
script; a new process, which has just run that part, has not. Without this module, the two would draw different
numbers in the block.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class EntryStreams:
    """The states of this process's random streams at one moment.

    Attributes:
        python: state of the ``random`` module.
        torch_cpu: state of torch's default CPU generator.
        numpy: state of NumPy's global generator; None if NumPy was not imported.
        cuda: state of the current device's generator; None if CUDA was not in use.
    """

    python: tuple[Any, ...]
    torch_cpu: torch.Tensor
    numpy: dict[str, Any] | None
    cuda: torch.Tensor | None

    @classmethod
    def capture(cls) -> EntryStreams:
        """Capture the current states."""
        numpy = _numpy_random()
        return cls(
            random.getstate(),
            torch.get_rng_state(),
            numpy.get_state(legacy=False) if numpy is not None else None,
            torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        )

    def restore(self) -> None:
        """Restore the captured states.

        If CUDA was not in use at the capture, it is seeded as torch would seed it at the first use.
        """
        random.setstate(self.python)
        torch.set_rng_state(self.torch_cpu)
        numpy = _numpy_random()
        if numpy is not None and self.numpy is not None:
            numpy.set_state(self.numpy)
        if torch.cuda.is_initialized():
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda)
            else:
                torch.cuda.manual_seed(torch.initial_seed())


def _numpy_random() -> Any:
    return sys.modules.get("numpy.random")
