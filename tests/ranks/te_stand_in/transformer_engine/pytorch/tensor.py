"""Stands for tensors in FP8, which Megatron looks for when it is imported; no test has one."""

import torch


class QuantizedTensor(torch.Tensor):
    """A tensor in FP8."""
