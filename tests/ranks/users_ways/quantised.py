"""Provide a layer whose weight is kept in eight bits, on the CPU, as with ``fp8_param_gather``.

What is here has what bites of TransformerEngine 2.20's ``Float8Tensor`` and ``quantize_master_weights``: the
parameter has no storage of its own and shows 16 bits; Megatron's buffers hold its bytes; main parameters are
quantised by the whole data-parallel group, which agrees on the largest value, and which hangs if one of its ranks
does not come.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import fp8_utils
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.transformer.spec_utils import ModuleSpec

from tests.ranks.users_ways.scaled import LARGEST, DelayedScalingState, ScaledLinear, Straight, scaled_layers

_WEIGHT = 1  # its index among the scales of a layer
_FORMAT = torch.float8_e4m3fn


def quantised_layers(config: Any) -> ModuleSpec:
    """Return layers whose first product after the attention keeps its weight in eight bits."""
    _install()
    return scaled_layers(config, QuantisedLinear)


class Quantizer:
    """Makes bytes of values: with the scales of a layer, or with a scale from the values at hand."""

    def __init__(self, state: DelayedScalingState | None) -> None:
        self.state = state

    def scale(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the scale for values of which ``largest`` is the largest on any rank."""
        if self.state is not None:
            return self.state.scale[_WEIGHT]
        return torch.where(largest > 0, LARGEST / largest, torch.ones_like(largest))


class QuantisedTensor(torch.Tensor):
    """Implements a tensor of bytes and a scale, which shows 16 bits and has no storage of its own."""

    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _quantizer: Quantizer

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale_inv: torch.Tensor, quantizer: Quantizer) -> QuantisedTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16, device=data.device)
        made._data, made._scale_inv, made._quantizer = data, scale_inv, quantizer
        return made

    def dequantize(self) -> torch.Tensor:
        return (self._data.view(_FORMAT).float() * self._scale_inv).bfloat16()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._data, args[0]._scale_inv, args[0]._quantizer)
        if func is torch.ops.aten._to_copy.default:
            return args[0].dequantize().to(**(kwargs or {}))
        if func._schema.is_mutable and isinstance(args[0], cls):
            raise NotImplementedError(f"{func} would change a copy of the values")
        values = [each.dequantize() if isinstance(each, cls) else each for each in args]
        return func(*values, **(kwargs or {}))


class QuantisedLinear(ScaledLinear):
    """Implements Megatron's column-parallel product with a weight in eight bits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not getattr(self.config, "fp8_param", False):
            raise AssertionError("the model is to keep its parameters in FP8")
        self._delayed = self.config.fp8_recipe == "delayed"
        if self._delayed:
            self.fp8_meta["num_gemms"] = 1
            self.init_fp8_meta_tensors(None)
        drawn: Any = self.get_parameter("weight")
        self.weight = _quantised_parameter(drawn, self.fp8_meta["scaling_fwd"] if self._delayed else None)

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Multiply by the weight, and with scales that are kept by the quantised input."""
        weight = Straight.apply(self.weight, QuantisedTensor.dequantize)
        forward = super().forward if self._delayed else self.product
        return forward(input_, weight, **kwargs)


def _quantised_parameter(drawn: torch.nn.Parameter, state: DelayedScalingState | None) -> torch.nn.Parameter:
    """Return a weight in eight bits, which hands out once what it was drawn as."""
    values = drawn.detach().float()
    quantizer, largest = Quantizer(state), values.abs().max()
    scale = quantizer.scale(largest).clone()
    tensor = QuantisedTensor(_bytes(values, scale), scale.reciprocal(), quantizer)
    if state is not None:
        _note(state, largest)
    made = torch.nn.Parameter(tensor)
    made.__dict__.update({name: value for name, value in vars(drawn).items() if not name.startswith("_")})
    made.get_high_precision_init_val = values.clone  # type: ignore[attr-defined]
    made.clear_high_precision_init_val = lambda: delattr(made, "get_high_precision_init_val")  # type: ignore[attr-defined]
    return made


def _bytes(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values * scale).clamp(-LARGEST, LARGEST).to(_FORMAT).view(torch.uint8)


def _note(state: DelayedScalingState, largest: torch.Tensor) -> None:
    state.amax_history[0, _WEIGHT] = torch.maximum(state.amax_history[0, _WEIGHT], largest)


def _install() -> None:
    """Have Megatron take these tensors for TransformerEngine's."""
    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS = True
    fp8_utils.FP8_TENSOR_CLASS = QuantisedTensor
    fp8_utils._modify_underlying_storage_impl = _move_bytes
    fp8_utils._quantize_param_shard_impl = _quantise_shards
    param_and_grad_buffer.dist_all_gather_func = _gather_bytes


def _gather_bytes(output: torch.Tensor, given: torch.Tensor, **options: Any) -> Any:
    """Gather parameters as Megatron does: gloo turns buckets of different types that go together into one type."""
    return dist.all_gather_into_tensor(output.view(torch.uint8), given.view(torch.uint8), **options)


def _move_bytes(tensor: QuantisedTensor, place: torch.Tensor) -> None:
    place.copy_(tensor._data)
    tensor._data = place


def _quantise_shards(
    tensors: list[QuantisedTensor],
    mains: list[torch.Tensor | None],
    offsets: list[int | None],
    group: dist.ProcessGroup,
    shards: None = None,
) -> None:
    """Quantise this rank's shards of main parameters in place; a rank without a part of a tensor has None."""
    if not tensors:
        return
    mains = [main if main is None else main.bfloat16().float() for main in mains]  # what the tensors show
    largest = torch.stack([torch.zeros(()) if main is None else main.abs().max() for main in mains])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    for tensor, main, offset, amax in zip(tensors, mains, offsets, largest):
        scale = tensor._quantizer.scale(amax)
        tensor._scale_inv.copy_(scale.reciprocal())
        if tensor._quantizer.state is not None:
            _note(tensor._quantizer.state, amax)
        if main is not None and offset is not None:
            tensor._data.view(-1)[offset : offset + main.numel()] = _bytes(main, scale)
