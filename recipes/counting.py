"""Counts how many parameters each GPU holds, on the real model.

NeMo and Megatron build the part of one rank of each pipeline stage, at the job's real world size, on torch's meta
device (shapes without memory) and in a process group without connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from torch import nn

from checkpointless.recipes.layout import check_layout
from checkpointless.recipes.memory import Count, Stage
from checkpointless.recipes.objects import ObjectError, make
from checkpointless.recipes.runner import prepare_process
from checkpointless.recipes.settings import RecipeError, first_line, parameters
from checkpointless.system.layout import Layout

# Kernels that a model's configuration asks for and that change no parameter. The model is built from Megatron's own
# layers, which have the same parameters as TransformerEngine's and can be built where that is not installed.
_KERNELS = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "gradient_accumulation_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "persist_layer_norm",
)


def count(config: DictConfig, layout: Layout) -> list[Stage] | str:
    """Return the parameters on each GPU of every pipeline stage, or one line that says why they are not known.

    Tensor- and expert-parallel ranks of one stage hold equal numbers, so one rank of each stage is examined.

    Args:
        config: the recipe.
        layout: the layout of its ranks, which can work.

    Raises:
        RecipeError: the model cannot be laid out in this way.
    """
    prepare_process()
    try:
        strategy: Any = make(config, "strategy")
        return [_stage(config, layout, strategy, number) for number in range(layout.pipeline)]
    except ObjectError as error:
        return first_line(error.__cause__ or error)
    except RecipeError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever NeMo and Megatron refuse
        return first_line(error)


@contextmanager
def as_rank(layout: Layout, rank: int) -> Iterator[None]:
    """Act as one rank of a job, as far as Megatron's process groups tell, although there is no other rank."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            num_distributed_optimizer_instances=layout.instances,
            order="tp-cp-ep-pp-dp" if layout.pipeline_before_data else "tp-cp-ep-dp-pp",
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _stage(config: DictConfig, layout: Layout, strategy: Any, number: int) -> Stage:
    from megatron.core import parallel_state

    found: list[nn.Parameter] = []
    apart = layout.tensor * layout.context if layout.pipeline_before_data else layout.world_size // layout.pipeline
    with as_rank(layout, number * apart):
        for chunk in range(layout.virtual_pipeline):
            if layout.virtual_pipeline > 1:
                parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            found += _build(config, layout, strategy, chunk).parameters()
    expert = [each for each in found if not getattr(each, "allreduce", True)]  # Megatron's own mark
    dense = [each for each in found if getattr(each, "allreduce", True)]
    once = [each for each in dense if not (number and getattr(each, "shared_embedding", False))]  # also in stage 0
    whole = _whole(once, layout.tensor) + _whole(expert, layout.expert_tensor) * layout.expert
    return Stage(_counted(dense), _counted(expert), whole)


def _build(config: DictConfig, layout: Layout, strategy: Any, chunk: int) -> nn.Module:
    """Build one rank's part of the model on the meta device, with the adapters that training would add."""
    from nemo.collections.llm.gpt.model.base import default_layer_spec, local_layer_spec
    from nemo.lightning._strategy_lib import set_model_parallel_attributes

    model: Any = make(_without_kernels(config), "model", tokenizer=_tokenizer(config))
    check_layout(config, layout, model.config.num_layers, model.config.num_attention_heads)
    set_model_parallel_attributes(model, strategy.parallelism)
    settings = model.config
    settings.use_cpu_initialization = True  # weights on torch's default device, not on the current GPU
    if settings.transformer_layer_spec is default_layer_spec:
        settings.transformer_layer_spec = local_layer_spec
    # Neither changes a parameter, and Megatron's own layers refuse them.
    settings.sequence_parallel, settings.context_parallel_size = False, 1
    with torch.device("meta"):
        model.module = settings.configure_model(model.tokenizer, vp_stage=chunk)
        if OmegaConf.select(config, "peft") is not None:
            peft: Any = make(config, "peft")
            prepare_process()  # NeMo's LoRA needs the CPU platform as well, if that is asked for
            model.freeze()  # as NeMo's PEFT callback does when training begins
            model.walk(peft.transform)
    built: nn.Module = model.module
    return built


def _without_kernels(config: DictConfig) -> DictConfig:
    """Return the recipe with the fused kernels of its model switched off."""
    target = OmegaConf.select(config, "model.config._target_")
    if target is None:
        return config
    known = parameters(target)
    plain = config.copy()
    plain.model.config.update({kernel: False for kernel in _KERNELS if kernel in known})
    return plain


def _tokenizer(config: DictConfig) -> Any:
    """Return the tokenizer if only it knows how large the vocabulary is, else None."""
    default = getattr(get_class(config.model.config._target_), "vocab_size", None)
    if OmegaConf.select(config, "model.config.vocab_size") is not None or default is not None:
        return None
    if OmegaConf.missing_keys(config.data):
        raise ValueError(
            "the size of the vocabulary is the tokenizer's: give data.tokenizer, or model.config.vocab_size"
        )
    data: Any = make(config, "data")
    return data.tokenizer


def _counted(found: Sequence[nn.Parameter]) -> Count:
    return Count(
        total=sum(each.numel() for each in found), trained=sum(each.numel() for each in found if each.requires_grad)
    )


def _whole(found: Sequence[nn.Parameter], tensor: int) -> int:
    """Count the elements over all tensor-parallel ranks, which split the parameters that Megatron has marked."""
    return sum(each.numel() * (tensor if getattr(each, "tensor_model_parallel", False) else 1) for each in found)
