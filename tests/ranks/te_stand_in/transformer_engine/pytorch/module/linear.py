"""Stands for the linear layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, WeightGradStore


class Linear(TransformerEngineBaseModule):
    """Keeps what `Linear` keeps: `module/linear.py:1127` to 1212, and its groups as the base class has them."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        rng_tracker_name: str | None = None,
        device: str = "cpu",
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        super().__init__()
        assert not fuse_wgrad_accumulation
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self.wgrad_store = WeightGradStore()
        self.tp_size = tp_group.size() if tp_group is not None else tp_size
        if tp_group is not None or tp_size == 1:
            self.set_tensor_parallel_group(tp_group)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel  # `module/linear.py:1170`
        self.parallel_mode = parallel_mode
        if parallel_mode == "column":
            self.out_features //= self.tp_size
        elif parallel_mode == "row":
            self.in_features //= self.tp_size
        self.weight_names, self.bias_names = ["weight"], ["bias"]
        weight = torch.empty(self.out_features, self.in_features, dtype=params_dtype, device=device)
        self.init_weight("weight", torch.nn.Parameter(weight), init_method)
        if bias:
            zeros = torch.zeros(self.out_features, dtype=params_dtype, device=device)
            self.init_weight("bias", torch.nn.Parameter(zeros), None)
            if parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[assignment]

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Multiply, with the group's sum where the layer is parallel."""
        self.begin_forward(inp)
        out = F.linear(self.enter(inp) if self.parallel_mode == "column" else inp, self.weight)
        if self.parallel_mode == "row":
            out = self.leave(out)
        if self.apply_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out
