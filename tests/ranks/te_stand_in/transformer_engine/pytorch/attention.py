"""Stands for the core of attention; files and lines are those of `attention/dot_product_attention/`."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


class DotProductAttention(TransformerEngineBaseModule):
    """Keeps what `DotProductAttention` keeps.

    * `dot_product_attention.py:323`: a logger, which leads to all loggers and their handlers.
    * `dot_product_attention.py:344` to 347: groups and ranks of context parallelism.
    * `dot_product_attention.py:363` to 369: the tracker of random streams that there was when it was built, and a
      bound method of it, which its parts get (lines 420 to 450).
    * `dot_product_attention.py:464`: a hook of its own behind the load of a state.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        *,
        num_gqa_groups: int,
        attention_dropout: float,
        attn_mask_type: str,
        sequence_parallel: bool,
        tp_size: int,
        get_rng_state_tracker: Any,
        tp_group: Any,
        layer_number: int,
        attention_type: str,
        softmax_scale: float | None,
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        super().__init__()
        self.logger = logging.getLogger("DotProductAttention")
        assert attn_mask_type == "causal"
        assert num_gqa_groups == num_attention_heads
        self.tp_size = tp_group.size() if tp_group is not None else tp_size
        self.set_tensor_parallel_group(tp_group)
        self.get_rng_state_tracker = get_rng_state_tracker
        self.num_attention_heads, self.layer_number = num_attention_heads, layer_number
        self.attention_type, self.attention_dropout = attention_type, attention_dropout
        self.cp_group, self.cp_global_ranks, self.cp_stream = cp_group, cp_global_ranks, cp_stream
        self.cp_comm_type = cp_comm_type
        self.rng_states_tracker = None
        dropout_in: Any = nullcontext
        if not sequence_parallel and get_rng_state_tracker is not None:
            self.rng_states_tracker = get_rng_state_tracker()
            dropout_in = self.rng_states_tracker.fork  # type: ignore[attr-defined]
        self.unfused_attention = UnfusedDotProductAttention(
            softmax_scale or 1.0 / math.sqrt(kv_channels),
            attention_dropout=attention_dropout,
            attention_dropout_ctx=dropout_in,
        )
        self.register_load_state_dict_post_hook(_accept)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: str = "causal",
    ) -> torch.Tensor:
        self.begin_forward(query)
        mask = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool).triu(1)
        if self.cp_group is not None:
            key, value, mask = _gathered(key, value, self.cp_group)
        return self.unfused_attention(query, key, value, mask)


class UnfusedDotProductAttention(torch.nn.Module):
    """Keeps the tracker's `fork`, bound to the tracker of the time it was built (`backends.py:212`)."""

    def __init__(self, softmax_scale: float, *, attention_dropout: float, attention_dropout_ctx: Any) -> None:
        super().__init__()
        self.softmax_scale, self.attention_type = softmax_scale, "self"
        self.attention_dropout_ctx = attention_dropout_ctx
        self.scale_mask_softmax = FusedScaleMaskSoftmax()
        self.attention_dropout = torch.nn.Dropout(attention_dropout)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        scores = torch.einsum("sbhd,tbhd->bhst", query, key)
        probabilities = self.scale_mask_softmax(scores, mask, "causal", self.softmax_scale)
        with self.attention_dropout_ctx():
            probabilities = self.attention_dropout(probabilities)
        return torch.einsum("bhst,tbhd->sbhd", probabilities, value).flatten(2)


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Keeps attributes that do not exist before the first forward pass (`softmax.py:173` to 176)."""

    def forward(self, inp: torch.Tensor, mask: torch.Tensor, attn_mask_type: str, scale: float) -> torch.Tensor:
        self.input_in_fp16 = inp.dtype == torch.float16
        self.input_in_bf16 = inp.dtype == torch.bfloat16
        self.input_in_float16 = self.input_in_fp16 or self.input_in_bf16
        self.attn_mask_type = attn_mask_type
        return torch.softmax((inp * scale).masked_fill(mask, -10000.0), dim=-1)


def _accept(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """Accept a state without what FP8 adds to it."""


def _gathered(key: torch.Tensor, value: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
    """Return keys and values of all ranks of a group, and the mask of what this rank's queries may not see."""
    rank, ranks = group.rank(), group.size()
    length = key.size(0) * ranks
    there = torch.cat([_places(other, ranks, length) for other in range(ranks)])
    mask = there[None, :] > _places(rank, ranks, length)[:, None]
    return _Gather.apply(key, group), _Gather.apply(value, group), mask


def _places(rank: int, ranks: int, length: int) -> torch.Tensor:
    """Return which tokens of a sequence Megatron gives to a rank: a piece of its beginning and one of its end."""
    piece = length // (2 * ranks)
    return torch.cat([torch.arange(start * piece, (start + 1) * piece) for start in (rank, 2 * ranks - rank - 1)])


class _Gather(torch.autograd.Function):
    """Concatenates the parts of all ranks of a group, and sums the gradients of each rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None
