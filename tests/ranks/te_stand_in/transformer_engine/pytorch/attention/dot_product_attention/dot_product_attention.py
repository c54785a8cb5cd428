"""Stands for the core of attention."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from typing import Any

import torch

from transformer_engine.pytorch.attention.dot_product_attention.backends import UnfusedDotProductAttention
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
        self.cp_group = self.cp_global_ranks = self.cp_stream = None
        self.cp_comm_type = "p2p"
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
        """Return the attention of this rank's heads."""
        self.begin_forward(query)
        return self.unfused_attention(query, key, value)


def _accept(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """Accept a state without what FP8 adds to it."""
