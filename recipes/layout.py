"""How a recipe's ranks are laid out: parallel sizes, which ranks hold the same shard, and what is lost with a node.

All of this is arithmetic on the recipe, without torch. It follows Megatron-core's `parallel_state`; a test compares
the two rank by rank.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from checkpointless.recipes.settings import RecipeError, checkpointless_enabled

#: Megatron's orders of ranks, the fastest dimension first: NeMo's default, and the order of `use_tp_pp_dp_mapping`.
_ORDER = ("tp", "cp", "ep", "dp", "pp")
_ORDER_PIPELINE_FIRST = ("tp", "cp", "ep", "pp", "dp")


@dataclass(frozen=True)
class Layout:
    """The parallel sizes of a job.

    Attributes:
        nodes: the number of nodes.
        ranks_per_node: the number of ranks on each node, one per GPU.
        tensor, pipeline, context, expert, expert_tensor: the numbers of ranks that share one part of the model.
        virtual_pipeline: the number of parts of the model on each pipeline stage.
        instances: the value of `num_distributed_optimizer_instances`.
        sharded: whether the optimizer is Megatron's distributed optimizer.
        micro_batch, global_batch: the numbers of samples on one rank (1 if the recipe does not say) and in a whole
            step (0 if the recipe does not say).
        pipeline_before_data: the value of `use_tp_pp_dp_mapping`, which makes a pipeline's stages neighbours.
    """

    nodes: int
    ranks_per_node: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int = 1
    instances: int = 1
    sharded: bool = True
    micro_batch: int = 1
    global_batch: int = 0
    pipeline_before_data: bool = False

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def data(self) -> int:
        """The data-parallel size: the number of ranks that read different samples."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """The number of ranks that hold the same experts."""
        return self.world_size // (self.expert_tensor * self.expert * self.pipeline)

    @property
    def shards(self) -> int:
        """The number of parts into which one optimizer instance cuts all parameters but the experts'."""
        return self.data * self.context // self.instances if self.sharded else 1

    @property
    def expert_shards(self) -> int:
        """The number of parts into which one optimizer instance cuts the experts' parameters."""
        return self.expert_data // self.instances if self.sharded else 1

    @property
    def microbatches(self) -> int:
        """The number of microbatches of each rank in a step."""
        return self.global_batch // (self.micro_batch * self.data)

    def groups(self, sizes: dict[str, int], together: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the groups of ranks that differ only in `together`, as Megatron's rank generator makes them."""
        order = _ORDER_PIPELINE_FIRST if self.pipeline_before_data else _ORDER
        strides = dict(zip(order, itertools.accumulate((sizes[name] for name in order), operator.mul, initial=1)))

        def offsets(names: Sequence[str]) -> list[int]:
            steps = ([index * strides[name] for index in range(sizes[name])] for name in names)
            return sorted(sum(parts) for parts in itertools.product(*steps))

        inside = offsets([name for name in order if name in together])
        outside = offsets([name for name in order if name not in together])
        return [tuple(first + each for each in inside) for first in outside]

    def replica_groups(self) -> list[tuple[int, ...]]:
        """Return the groups of ranks that hold the same shard of model and optimizer state, each sorted."""
        experts = self.groups(self._expert_sizes(), ("dp",))
        if self.sharded:
            return sorted(_across(experts, self.instances))
        others = {rank: set(group) for group in self.groups(self._sizes(), ("cp", "dp")) for rank in group}
        return sorted({tuple(sorted(set(group) & others[rank])) for group in experts for rank in group})

    def lost_with_a_node(self) -> list[tuple[int, ...]]:
        """Return the replica groups that have all their ranks on one node, and so are lost with it."""
        return [
            group for group in self.replica_groups() if len({rank // self.ranks_per_node for rank in group}) == 1
        ]

    def check(self, layers: int | None = None, heads: int | None = None) -> None:
        """Raise if this layout cannot work, with one line that says why; Megatron's own checks come late and terse.

        Args:
            layers: the number of layers of the model, if it is known.
            heads: the number of attention heads, if it is known.

        Raises:
            RecipeError: a size does not divide what it must, or replicas would not hold the same state.
        """
        world, model = self.world_size, self.tensor * self.pipeline * self.context
        experts = self.expert_tensor * self.expert * self.pipeline
        stages = self.pipeline * self.virtual_pipeline
        both = self.data * self.context
        one_step = self.micro_batch * self.data
        checks = [
            (world, model, f"{world} ranks cannot be cut into models of {model} ranks"),
            (world, experts, f"{world} ranks cannot be cut into sets of experts of {experts} ranks"),
            (heads or 0, self.tensor, f"{heads} attention heads cannot be shared by {self.tensor} ranks"),
            (layers or 0, stages, f"{layers} layers cannot be shared by {stages} pipeline stages"),
            (both, self.instances, f"{both} data-parallel ranks cannot hold {self.instances} optimizer instances"),
            (
                self.expert_data,
                self.instances,
                f"{self.expert_data} holders of an expert cannot hold {self.instances} optimizer instances",
            ),
            (
                self.global_batch,
                one_step,
                f"a global batch of {self.global_batch} is not a multiple of {self.micro_batch} x "
                f"{self.data} ranks",
            ),
        ]
        for whole, part, message in checks:
            if not part or whole % part:
                raise RecipeError(message)
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise RecipeError("virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size above 1")
        if self.sharded and self.instances > 1:
            dense = sorted(_across(self.groups(self._sizes(), ("cp", "dp")), self.instances))
            if dense != self.replica_groups():
                raise RecipeError(
                    "experts and other weights would have different replicas: make the data-parallel size "
                    f"({self.data}) a multiple of {self.instances} instances"
                )

    def _sizes(self) -> dict[str, int]:
        return {"tp": self.tensor, "cp": self.context, "ep": 1, "dp": self.data, "pp": self.pipeline}

    def _expert_sizes(self) -> dict[str, int]:
        experts = {"tp": self.expert_tensor, "cp": 1, "ep": self.expert}
        return experts | {"dp": self.expert_data, "pp": self.pipeline}


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
    return Layout(
        nodes=nodes or size("trainer.num_nodes"),
        ranks_per_node=ranks_per_node or size("trainer.devices"),
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


def check_layout(config: DictConfig, layout: Layout, layers: int | None = None, heads: int | None = None) -> None:
    """Raise if the recipe's ranks cannot be laid out in this way, as far as is known.

    Args:
        config: the recipe.
        layout: the layout of its ranks.
        layers: the number of layers of the model, where the recipe leaves it to the model's class.
        heads: the number of attention heads, where the recipe leaves it to the model's class.

    Raises:
        RecipeError: the layout cannot work; the message is one line that says why.
    """
    layers = OmegaConf.select(config, "model.config.num_layers", default=layers)
    heads = OmegaConf.select(config, "model.config.num_attention_heads", default=heads)
    layout.check(None if _stages_are_uneven(config) else layers, heads)


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


def _across(groups: Sequence[tuple[int, ...]], instances: int) -> Iterator[tuple[int, ...]]:
    """Cut each group into one run per instance, and join the ranks that stand at the same place of each run."""
    for group in groups:
        run = len(group) // instances
        yield from (group[place::run] for place in range(run))


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
