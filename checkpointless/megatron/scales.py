"""The scales of FP8 training, which TransformerEngine's layers keep beside their parameters.

With delayed scaling a layer quantises by scales that follow from the largest values of earlier steps. It keeps both
in objects of its own, where no ``state_dict`` and no list of buffers shows them; a checkpoint has them as pickled
extra state. Here they become buffers of their layer, in the same memory, so that they are taken back, sent and
compared like any other buffer, and nothing is unpickled. The other recipes compute scales from the tensor at hand
and keep nothing.

What is used of a layer (``TransformerEngineBaseModule`` of TransformerEngine 2.0 to 2.20): ``fp8_meta`` and
``init_fp8_meta_tensors``. A layer changes scales and histories in place, and keeps those that it has if it is
initialised again with the same recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_recipe
from torch.autograd.graph import increment_version

from checkpointless.inprocess import UnrecoverableError
from checkpointless.precision import DELAYED, fp8_recipe
from checkpointless.recovery.own.buffers import OWN_BUFFER_BYTES

_META = ("scaling_fwd", "scaling_bwd")
_TENSORS = ("scale", "amax_history")
_PREFIX = "checkpointless_"  # of the buffers' names, which a layer must not have itself
#: Layers with more products than one; each has three scales forward and two backward.
_PRODUCTS = {"LayerNormMLP": 2}
_ATTENTION = "DotProductAttention"  # quantises only with fp8_dot_product_attention, which is refused


class Scales:
    """The scales of a model's layers, which are buffers of the layers from now on. Checkpoints do not get them.

    Args:
        chunks: the model's chunks, as Megatron's ``DistributedDataParallel`` wraps them.

    Raises:
        UnrecoverableError: a layer keeps its scales in a way that is not known here.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module]) -> None:
        self._layers: list[Any] = []
        for chunk in chunks:
            config = getattr(chunk, "config", None)
            if getattr(config, "fp8", None) and fp8_recipe(config) == DELAYED:
                self._layers += [layer for name, layer in chunk.named_modules() if _begin(name, layer, config)]
        self.follow()
        nbytes = sum(tensor.nbytes for layer in self._layers for _, tensor in _tensors(layer))
        if nbytes > OWN_BUFFER_BYTES:  # a validation leaves each rank with largest values of its own
            raise UnrecoverableError(
                f"checkpointless keeps at most {OWN_BUFFER_BYTES >> 20} MiB of FP8 histories for each rank, and "
                f"they take {nbytes >> 20} MiB: set fp8_amax_history_len to less"
            )

    def follow(self) -> None:
        """Take the tensors that the layers use now: a checkpoint may bring a history of another length."""
        for layer in self._layers:
            for name, tensor in _tensors(layer):
                if layer._buffers.get(name) is not tensor:
                    layer.register_buffer(name, tensor, persistent=False)
                increment_version(tensor)  # TransformerEngine's kernels write where torch does not see it


def _begin(name: str, layer: Any, config: Any) -> bool:
    """Have a layer make its scales, as its first forward pass does it; return whether it has any."""
    if not isinstance(getattr(layer, "fp8_meta", None), dict) or _is_a(layer, _ATTENTION):
        return False
    recipe = get_fp8_recipe(config)
    # With the last two, a checkpoint that is made before the first forward pass has the scales.
    layer.fp8_meta |= {"num_gemms": _products(layer), "recipe": recipe, "fp8_checkpoint": True}
    try:
        layer.init_fp8_meta_tensors(recipe)
        found = {name for name, _ in _tensors(layer)}
    except (AttributeError, KeyError, TypeError) as error:
        found, reason = set(), f": {type(error).__name__}: {error}"
    else:
        reason = f": it has {', '.join(sorted(found)) or 'none'}"
    if not found >= {f"{_PREFIX}{meta}_{tensor}" for meta in _META for tensor in _TENSORS}:
        raise UnrecoverableError(
            f"checkpointless does not know the FP8 scales of {name} ({type(layer).__name__}){reason}: set fp8=None"
        )
    return True


def _tensors(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a layer's scales, with the names of their buffers."""
    for meta in _META:
        for name in _TENSORS:
            tensor = getattr(layer.fp8_meta.get(meta), name, None)
            if isinstance(tensor, torch.Tensor):
                yield f"{_PREFIX}{meta}_{name}", tensor


def _products(layer: Any) -> int:
    found = getattr(layer, "num_gemms", None)
    if isinstance(found, int):
        return found
    return next((number for name, number in _PRODUCTS.items() if _is_a(layer, name)), 1)


def _is_a(layer: Any, name: str) -> bool:
    """Return whether a layer is of a class of this name, which may not be imported here."""
    return any(base.__name__ == name for base in type(layer).__mro__)
