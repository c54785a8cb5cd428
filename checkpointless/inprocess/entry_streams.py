"""The random streams at the entry of the block, the same at every entry.

A process that enters its block again has drawn from streams that were seeded before it, at the top of the script; a
new process, which has run that part afresh, has not. Without this they would draw different numbers in the block.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class EntryStreams:
    """The streams of this process at one moment.

    Attributes:
        python: of the module ``random``.
        torch_cpu: torch's default one.
        numpy: NumPy's global one; None if NumPy was not imported.
        cuda: the current device's; None if CUDA was not in use.
    """

    python: tuple[Any, ...]
    torch_cpu: torch.Tensor
    numpy: dict[str, Any] | None
    cuda: torch.Tensor | None

    @classmethod
    def capture(cls) -> EntryStreams:
        """Take them."""
        numpy = _numpy_random()
        return cls(
            random.getstate(),
            torch.get_rng_state(),
            numpy.get_state(legacy=False) if numpy is not None else None,
            torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        )

    def restore(self) -> None:
        """Put them back. A CUDA that was not in use then is seeded as torch would do it at the first use."""
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
