"""Stands for several linear layers in one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, WeightGradStore


class GroupedLinear(TransformerEngineBaseModule):
    """Keeps what `GroupedLinear` keeps: `module/grouped_linear.py:592` to 683, parameters with a number each."""

    def __init__(
        self,
        num_gemms: int,
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
        ub_name: str | None = None,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        super().__init__()
        assert not bias
        assert tp_size == 1
        assert not sequence_parallel
        assert not fuse_wgrad_accumulation
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, False
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self.parallel_mode, self.ub_name = parallel_mode, ub_name
        self._offsets = {"input": 0, "weight": 1, "output": 2, "grad_output": 0, "grad_input": 1}
        self.wgrad_store = WeightGradStore()
        self.set_tensor_parallel_group(tp_group)
        for index in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.init_weight(f"weight{index}", torch.nn.Parameter(weight), init_method)

    def forward(self, inp: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """Multiply each part of the input with a matrix of its own."""
        self.begin_forward(inp)
        parts = torch.split(inp, [int(each) for each in m_splits])
        outs = [F.linear(part, getattr(self, f"weight{index}")) for index, part in enumerate(parts)]
        return torch.cat(outs)
