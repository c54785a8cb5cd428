"""A small Llama 3 of torchtitan, with what torchtitan lacks on CPU ranks: ``--module tests.titan.small``.

Import this before the Trainer: torchtitan looks for its device when it is imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.attention.flex_attention as flex
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

asked: dict[str, Any] = {
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=2**34, name="cpu"),
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda: None,
}
utils.device_type, utils.device_module = "cpu", SimpleNamespace(**vars(torch.cpu) | asked)
_barrier = dist.barrier
dist.barrier = lambda *args, device_ids=None, **kwargs: _barrier(*args, **kwargs)

from datasets import Dataset  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

# Its compiled form has no backward on CPUs, and compiling a mask takes longer than a step.
flex._validate_device = lambda *_: None
attention.FlexAttention._compiled_flex_attn = staticmethod(flex.flex_attention)
attention._compiled_create_block_mask = flex.create_block_mask

TEXTS = [{"text": f"{number} and {number * number} " * 6} for number in range(16)]
DATASETS["small"] = DatasetConfig("", lambda path: Dataset.from_list(TEXTS), lambda sample: sample["text"])
_fails: dict[str, int] = {}  # the step after which rank 1 raises, once, by what it does then


def _fail(where: str, step: int) -> None:
    if _fails.get(where) == step and os.environ["RANK"] == "1":
        _fails[where] = 0
        raise RuntimeError(f"asked for, in a {where}")


class _Bytes(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.eos_id = 0

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        return [*text.encode(), 0]

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 256


class _Validator(Validator):
    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def validate(self, model_parts: list[torch.nn.Module], step: int) -> None:
        _fail("validation", step)
        super().validate(model_parts, step)


class _Saves(CheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        _fail("save", curr_step)
        return bool(super().save(curr_step, last_step))


def _sum_gradients(optimizers: Any, model_parts: list[torch.nn.Module], parallel_dims: Any) -> None:
    """Have FSDP2 sum gradients and then divide: gloo has no sum with a factor."""
    for each in model_parts[0].modules():
        if isinstance(each, FSDPModule):
            each.set_force_sum_reduction_for_comms(True)


def small() -> Trainer.Config:
    """Return a configuration: accumulation, clipping, warm-up, validations, saves, and data for four steps."""
    config = llama3_debugmodel()
    del config.model_spec.model.layers[1:]
    config.model_spec.post_optimizer_build_fn = _sum_gradients
    config.dump_folder = os.environ["CHECKPOINTLESS_RUN_DIR"] + "/out"
    config.tokenizer = _Bytes.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="small")
    config.validator = _Validator.Config(enable=True, freq=3, steps=1, dataloader=config.dataloader)
    config.checkpoint = _Saves.Config(enable=True, interval=4, last_save_model_only=False)
    config.optimizer.implementation = "foreach"
    config.parallelism.data_parallel_replicate_degree = 2
    training = config.training
    training.seq_len, training.local_batch_size, training.steps = 32, 2, 9
    training.global_batch_size = 4 * int(os.environ["WORLD_SIZE"])
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    config.debug.seed, config.debug.enable_structured_logging, config.comm.trace_buf_size = 1, False, 0
    return config


def fails_in_a_validation() -> Trainer.Config:
    _fails.setdefault("validation", 6)
    return small()


def fails_in_a_save() -> Trainer.Config:
    _fails.setdefault("save", 4)
    return small()
