"""The layout of a recipe's ranks, and what is refused before they start."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from checkpointless.recipes.settings import RecipeError, checkpointless_enabled
from checkpointless.system.layout import Layout, LayoutError


def layout_of(config: DictConfig, nodes: int | None = None, ranks_per_node: int | None = None) -> Layout:
    """Return the layout that a recipe describes.

    Args:
        config: the recipe.
        nodes: the number of nodes. Default: `trainer.num_nodes`.
        ranks_per_node: the number of ranks on each node. Default: `trainer.devices`.
    """

    def size(key: str, default: int = 1) -> int:
        value = None if OmegaConf.is_missing(config, key) else OmegaConf.select(config, key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RecipeError(f"{key} must be a whole number of at least 1, not {value!r}")
        return value

    strategy = "strategy."
    tensor = size(strategy + "tensor_model_parallel_size")
    nodes, ranks_per_node = nodes or size("trainer.num_nodes"), ranks_per_node or size("trainer.devices")
    return Layout(
        world_size=nodes * ranks_per_node,
        ranks_per_node=ranks_per_node,
        tensor=tensor,
        pipeline=size(strategy + "pipeline_model_parallel_size"),
        context=size(strategy + "context_parallel_size"),
        expert=size(strategy + "expert_model_parallel_size"),
        expert_tensor=size(strategy + "expert_tensor_parallel_size", tensor),
        virtual_pipeline=size(strategy + "virtual_pipeline_model_parallel_size"),
        instances=size(strategy + "num_distributed_optimizer_instances", _instances_by_default(config)),
        sharded=bool(OmegaConf.select(config, "optim.config.use_distributed_optimizer", default=False)),
        micro_batch=size("data.micro_batch_size"),
        global_batch=size("data.global_batch_size", 0),
        pipeline_before_data=bool(OmegaConf.select(config, strategy + "use_tp_pp_dp_mapping", default=False)),
    )


def check_layout(config: DictConfig, layout: Layout) -> None:
    """Raise if the recipe's ranks cannot be laid out in this way, as far as is known.

    Args:
        config: the recipe.
        layout: the layout of its ranks.

    Raises:
        RecipeError: the layout cannot work; the message is one line that says why.
    """
    layers = OmegaConf.select(config, "model.config.num_layers")
    heads = OmegaConf.select(config, "model.config.num_attention_heads")
    try:
        layout.check(None if _stages_are_uneven(config) else layers, heads)
    except LayoutError as error:
        raise RecipeError(str(error)) from error


def check_replicas(layout: Layout) -> None:
    """Raise if a shard has only one holder, so that nothing is left of it when that rank dies.

    Raises:
        RecipeError: there is no replica; the message is one line that says what to set.
    """
    if min(map(len, layout.replica_groups())) < 2:
        if layout.sharded and layout.instances == 1:
            raise RecipeError(
                "there is no replica: every shard of the optimizer has one holder; "
                "set strategy.num_distributed_optimizer_instances=2"
            )
        raise RecipeError(
            f"there is no replica: {layout.world_size} ranks are one data-parallel rank; use more, "
            "or smaller parallel sizes"
        )


def _instances_by_default(config: DictConfig) -> int:
    """Return the strategy's default where the recipe says nothing: ours keeps two replicas, Megatron's one."""
    ours = (
        str(OmegaConf.select(config, "strategy._target_", default="")).rpartition(".")[2]
        == "CheckpointlessMegatronStrategy"
    )
    return 2 if ours or checkpointless_enabled(config) else 1


def _stages_are_uneven(config: DictConfig) -> bool:
    return any(
        OmegaConf.select(config, f"strategy.{key}")
        for key in (
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "pipeline_model_parallel_layout",
        )
    )
