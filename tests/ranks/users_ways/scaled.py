"""Provide a layer that quantises as TransformerEngine's layers do with delayed scaling, on the CPU.

TransformerEngine has no kernels for the CPU. What is here has its state (``fp8_meta``, made at the first forward
pass; histories of the largest values, from which the scales of later passes follow; extra state) and its order:
values are noted as they pass, and all ranks that share a model or its data agree on the largest ones.
"""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

HISTORY = 4  # passes
LARGEST = 448.0  # of torch.float8_e4m3fn


def scaled_layers(config: Any, linear: type | None = None) -> ModuleSpec:
    """Return layers that quantise what goes into and comes back to their first product after the attention."""
    layer = copy.deepcopy(get_gpt_layer_local_spec(normalization=config.normalization))
    layer.submodules.mlp.submodules.linear_fc1 = linear or ScaledLinear
    return layer


class DelayedScalingState:
    """Keeps scales and histories that they follow from, as TransformerEngine's ``DelayedScalingRecipeState``."""

    def __init__(self, tensors: int) -> None:
        self.scale = torch.ones(tensors)
        self.amax_history = torch.zeros(HISTORY, tensors)

    def quantised(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Return a tensor rounded to eight bits at the scale of ``index``; note its largest value."""
        self.amax_history[0, index] = torch.maximum(self.amax_history[0, index], tensor.abs().max().float())
        scale = self.scale[index]
        rounded = (tensor.float() * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return (rounded.float() / scale).to(tensor.dtype)

    def update(self) -> None:
        """Agree with the other ranks on the largest values, and derive the next scales."""
        amax = self.amax_history[0].clone()
        group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        self.amax_history[0] = amax
        largest = self.amax_history.amax(dim=0)
        self.scale.copy_(torch.where(largest > 0, LARGEST / largest, self.scale))
        self.amax_history.copy_(torch.roll(self.amax_history, -1, 0))
        self.amax_history[0].zero_()


class ScaledLinear(ColumnParallelLinear):
    """Implements Megatron's column-parallel product in eight bits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self.fp8_meta_tensors_initialized = False

    def init_fp8_meta_tensors(self, recipe: object) -> None:
        if not self.fp8_meta_tensors_initialized:
            products = self.fp8_meta["num_gemms"]
            self.fp8_meta["scaling_fwd"] = DelayedScalingState(3 * products)
            self.fp8_meta["scaling_bwd"] = DelayedScalingState(2 * products)
            self.fp8_meta_tensors_initialized = True

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Multiply the quantised input by the weight: by its own, quantised, or by the one given, as it is."""
        self.fp8_meta |= {"num_gemms": 1, "fp8_checkpoint": True}
        self.init_fp8_meta_tensors(None)
        forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        rounded = Straight.apply(input_, partial(forward.quantised, index=0))
        if weight is None:
            weight = Straight.apply(self.weight, partial(forward.quantised, index=1))
        output, bias = self.product(rounded, weight, **kwargs)
        if torch.is_grad_enabled():  # a validation notes what passes, and leaves the scales
            forward.update()
        return _RoundedGradient.apply(output, backward), bias

    def product(self, input_: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(input_, weight, **kwargs)

    def get_extra_state(self) -> torch.Tensor:
        """Return what a checkpoint keeps beside the parameters, as bytes."""
        if not self.fp8_meta["fp8_checkpoint"]:
            return torch.empty(0, dtype=torch.uint8)
        written = io.BytesIO()
        torch.save({key: vars(self.fp8_meta[key]) for key in self.fp8_meta if key.startswith("scaling")}, written)
        return torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        if not state.numel():
            return
        self.fp8_meta["num_gemms"] = 1
        self.init_fp8_meta_tensors(None)
        for key, tensors in torch.load(io.BytesIO(state.numpy().tobytes()), weights_only=True).items():
            for name, tensor in tensors.items():
                getattr(self.fp8_meta[key], name).copy_(tensor)


class Straight(torch.autograd.Function):
    """Changes a tensor in the forward pass, and passes the gradient on as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, change: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        return change(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _RoundedGradient(torch.autograd.Function):
    """Quantises the gradient of what it passes on."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, state: DelayedScalingState) -> torch.Tensor:
        ctx.state = state
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        rounded = ctx.state.quantised(gradients[0], 0)
        ctx.state.update()
        return rounded, None
