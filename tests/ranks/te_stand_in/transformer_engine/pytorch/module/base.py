"""Stands for what all modules with parameters are derived from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class WeightGradStore:
    """Gradients whose computation is put off: none, and no queue (`module/_common.py:195` to 211)."""

    def __init__(self) -> None:
        self.context = None
        self.enabled = False


class TransformerEngineBaseModule(torch.nn.Module):
    """Keeps what TransformerEngine's modules keep.

    * `module/base.py:638` to 664: what FP8 needs, in dictionaries (`fp8_meta`, `quantizers`, `_fp8_workspaces`),
      and the names and values of the rest.
    * `module/base.py:967`: `activation_dtype` is None until the first forward pass has set it.
    * `module/base.py:982` to 994: the group is an attribute, `tp_group_initialized` comes with it.
    * `module/base.py:1011`, 1077, 1078: attributes that do not exist before the first forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = None
        self.next_iter_when_debug_should_be_run = 0
        self.fp8_initialized = False
        self.fp8 = False
        self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.fp8_meta_tensors_initialized = False
        self.quantizers: dict[str, Any] = {"scaling_fwd": {}, "scaling_bwd": {}}
        self.tp_group: Any = None
        self.tp_size = 1
        self.sequence_parallel = False
        self.param_init_meta: dict[str, Any] = {}
        self.primary_weights_in_fp8 = False
        self.preserve_high_precision_init_val = False
        self.fsdp_wrapped = False
        self.fsdp_group = None
        self._fp8_workspaces: dict[str, Any] = {}
        self.activation_dtype: torch.dtype | None = None
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group
        self.tp_group_initialized = True

    def begin_forward(self, inp: torch.Tensor) -> None:
        self.allow_different_data_and_param_types = False
        self.forwarded_at_least_once = True
        self.activation_dtype = inp.dtype
        self.fp8_parameters = False
        self.fp8 = self.fp8_calibration = self.fp8_initialized = False
        self.fp8_meta["fp8_checkpoint"] = False

    def init_weight(self, name: str, weight: torch.nn.Parameter, init_method: Callable[..., Any] | None) -> None:
        """Register a parameter with how it is made, which stays in a dictionary (`module/base.py:1236`)."""
        if init_method is not None:
            with torch.no_grad():
                init_method(weight)
        self.register_parameter(name, weight)
        self.param_init_meta[name] = init_method

    def enter(self, inp: torch.Tensor) -> torch.Tensor:
        """Have the gradient of a column-parallel layer's input summed over the group, or gather its sequence."""
        if self.tp_size == 1:
            return inp
        from megatron.core.tensor_parallel import mappings  # Megatron imports this module

        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(inp, group=self.tp_group)
        return mappings.copy_to_tensor_model_parallel_region(inp, group=self.tp_group)

    def leave(self, out: torch.Tensor) -> torch.Tensor:
        """Sum a row-parallel layer's output over the group, and keep this rank's part of the sequence."""
        if self.tp_size == 1:
            return out
        from megatron.core.tensor_parallel import mappings

        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        return mappings.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
