"""Builds a model anew in less memory, in a rank that holds the state of the one before and is about to restore it.

What a model that is built begins with is overwritten by the restore. So two things need not exist beside the state
that is held: the 16-bit parameters outside of the buffers that they are moved into, and new main parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8_utils import is_float8tensor

from checkpointless.state.module_tensors import PARAMETER
from checkpointless.transfer.tensor_entry import Key

_SHORT = (torch.bfloat16, torch.float16)


class OldMemory:
    """The main parameters of the state that a rank holds, as those of the optimizer that is built.

    Args:
        held: the tensors of the state, by key.

    Attributes:
        nbytes: how many bytes were not needed twice: main parameters, and parameters outside of buffers.
    """

    def __init__(self, held: Mapping[Key, torch.Tensor]) -> None:
        self._held = {
            key: each for key, each in held.items() if key[-1] == PARAMETER and each.dtype == torch.float32
        }
        self._next = iter(self._held.values())
        self.nbytes = 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Have Megatron build wrappers and optimizers in less memory, in this thread, while the context lasts."""
        own = threading.get_ident()
        wrap, make = DistributedDataParallel.__init__, megatron_optimizer.get_megatron_optimizer

        def slim(wrapper: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **options: Any) -> None:
            if threading.get_ident() == own:
                self._shrink(module)
            wrap(wrapper, config, ddp_config, module, *args, **options)

        def frugal(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != own:
                return make(*args, **options)
            with _conversions(self._main):
                return make(*args, **options)

        DistributedDataParallel.__init__ = slim  # type: ignore[method-assign]
        megatron_optimizer.get_megatron_optimizer = frugal
        try:
            yield
        finally:
            DistributedDataParallel.__init__ = wrap  # type: ignore[method-assign]
            megatron_optimizer.get_megatron_optimizer = make

    def _shrink(self, module: torch.nn.Module) -> None:
        """Let all elements of each trained 16-bit parameter be one, until it is moved into its buffer."""
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.dtype in _SHORT and not is_float8tensor(parameter):
                self.nbytes += parameter.numel() * parameter.dtype.itemsize
                parameter.data = parameter.data.new_zeros(1).expand(parameter.shape)

    def _main(self, short: torch.Tensor) -> torch.Tensor | None:
        """Return the main parameter to be for one in 16 bits, in the order in which optimizers make them."""
        found = next(self._next, None)
        if found is None or (found.shape, found.device) != (short.shape, short.device):
            self._next = iter(())  # it is not the optimizer that it was
            return None
        self.nbytes += found.numel() * found.dtype.itemsize
        return found.detach()  # without the gradient that it may have

    def check(self, shard: Mapping[Key, torch.Tensor]) -> None:
        """Have every main parameter in a place of its own that is not the one of the same key.

        Args:
            shard: the tensors of the optimizer that was built, by key.
        """
        places = {each.data_ptr(): key for key, each in self._held.items()}
        for key, each in shard.items():
            if each.numel() and places.get(each.data_ptr(), key) != key:
                each.data = torch.empty_like(each)


@contextmanager
def _conversions(result: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Take the result of this thread's conversions of 16 bits to 32 from elsewhere while the context lasts.

    Args:
        result: returns it; None: it is converted.
    """
    original, own = torch.Tensor.float, vars(torch.Tensor).get("float")
    thread = threading.get_ident()  # a logger's or a loader's converts tensors of its own

    def convert(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        found = result(tensor) if tensor.dtype in _SHORT and threading.get_ident() == thread else None
        return found if found is not None else original(tensor, *args, **options)

    torch.Tensor.float = convert  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own is not None:
            torch.Tensor.float = own  # type: ignore[method-assign]
        else:
            del torch.Tensor.float
