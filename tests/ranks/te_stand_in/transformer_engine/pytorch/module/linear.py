"""Stands for the linear layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, WeightGradStore


class _Products(TransformerEngineBaseModule):
    """What the layers with matrices keep alike."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        get_rng_state_tracker: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        rng_tracker_name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        super().__init__()
        assert not fuse_wgrad_accumulation
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self.parallel_mode = parallel_mode
        self.wgrad_store = WeightGradStore()


class Linear(_Products):
    """Keeps what `Linear` keeps: `module/linear.py:1127` to 1212, and its groups as the base class has them."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Any = None,
        bias: bool = True,
        params_dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        sequence_parallel: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, **options)
        self.tp_size = tp_group.size() if tp_group is not None else tp_size
        if tp_group is not None or tp_size == 1:
            self.set_tensor_parallel_group(tp_group)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel  # `module/linear.py:1170`
        if self.parallel_mode == "column":
            self.out_features //= self.tp_size
        elif self.parallel_mode == "row":
            self.in_features //= self.tp_size
        self.weight_names, self.bias_names = ["weight"], ["bias"]
        weight = torch.empty(self.out_features, self.in_features, dtype=params_dtype, device=device)
        self.init_weight("weight", torch.nn.Parameter(weight), init_method)
        if bias:
            zeros = torch.zeros(self.out_features, dtype=params_dtype, device=device)
            self.init_weight("bias", torch.nn.Parameter(zeros), None)
            if self.parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[assignment]

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        self.begin_forward(inp)
        out = F.linear(self.enter(inp) if self.parallel_mode == "column" else inp, self.weight)
        if self.parallel_mode == "row":
            out = self.leave(out)
        if self.apply_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    """Keeps what `LayerNormLinear` keeps: `module/layernorm_linear.py:1190` to 1290; there it is no `Linear`."""

    def __init__(self, in_features: int, out_features: int, *, eps: float, **options: Any) -> None:
        returns_normed = options.pop("return_layernorm_output")
        assert (options.pop("normalization"), options.pop("zero_centered_gamma")) == ("LayerNorm", False)
        super().__init__(in_features, out_features, **options)
        self.eps, self.return_layernorm_output = eps, returns_normed  # adapters set it
        dtype = options.get("params_dtype", torch.float32)
        self.init_weight("layer_norm_weight", torch.nn.Parameter(torch.ones(in_features, dtype=dtype)), None)
        self.init_weight("layer_norm_bias", torch.nn.Parameter(torch.zeros(in_features, dtype=dtype)), None)
        for each in (self.layer_norm_weight, self.layer_norm_bias):  # of which each rank sees a part
            each.sequence_parallel = self.sequence_parallel  # type: ignore[assignment]

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = F.layer_norm(inp, (inp.shape[-1],), self.layer_norm_weight, self.layer_norm_bias, self.eps)
        out = super().forward(normed, is_first_microbatch)
        if not self.return_layernorm_output:
            return out
        return (*out, normed) if self.return_bias else (out, normed)


class GroupedLinear(_Products):
    """Keeps what `GroupedLinear` keeps: `module/grouped_linear.py:592` to 683, parameters with a number each."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Any = None,
        params_dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        ub_name: str | None = None,
        sequence_parallel: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        assert (self.use_bias, tp_size, sequence_parallel) == (False, 1, False)
        self.num_gemms, self.ub_name = num_gemms, ub_name
        self._offsets = {"input": 0, "weight": 1, "output": 2, "grad_output": 0, "grad_input": 1}
        self.set_tensor_parallel_group(tp_group)
        for index in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.init_weight(f"weight{index}", torch.nn.Parameter(weight), init_method)

    def forward(self, inp: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> torch.Tensor:
        self.begin_forward(inp)
        parts = torch.split(inp, [int(each) for each in m_splits])
        outs = [F.linear(part, getattr(self, f"weight{index}")) for index, part in enumerate(parts)]
        return torch.cat(outs)
