"""Checks that find, from a recipe's values, a run that cannot work: ranks would say it after half a minute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from checkpointless.integrations.compat.precision import unabortable, unsupported
from checkpointless.observability.telemetry.wording import numbered, plural
from checkpointless.recipes.settings import RecipeError, checkpointless_enabled, missing
from checkpointless.system.layout import Layout, LayoutError

if TYPE_CHECKING:
    from checkpointless.recovery import Tier


def check(config: DictConfig, layout: Layout, needs_replicas: bool = False) -> None:
    """Raise a RecipeError that says what to set if the recipe cannot be trained, as far as its values show."""
    _check_layout(config, layout)
    _check_steps(config)
    _check_callbacks(config)
    if checkpointless_enabled(config):
        _check_checkpointless(config)
    tiers = tiers_of(config)
    for tier in tiers:
        try:
            tier.distances(layout.world_size, layout.ranks_per_node)
        except ValueError as error:
            raise RecipeError(f"checkpointless.tiers: {error}") from error
    if needs_replicas and checkpointless_enabled(config) and not tiers:
        _check_replicas(layout)


def _check_steps(config: DictConfig) -> None:
    steps = _value(config, "trainer.max_steps")
    if not isinstance(steps, int) or steps > 0:
        return
    ends_otherwise = any(_value(config, f"trainer.{key}") is not None for key in ("max_epochs", "max_time"))
    if steps != -1 or not ends_otherwise:
        raise RecipeError(
            f"trainer.max_steps={steps} trains nothing: it must be at least 1 (or -1 with trainer.max_epochs or "
            "trainer.max_time)"
        )


def _check_callbacks(config: DictConfig) -> None:
    callbacks = _value(config, "callbacks")
    if callbacks is None:
        return
    if not isinstance(callbacks, DictConfig):
        raise RecipeError("callbacks has a name for each callback: write `callbacks: {NAME: {_target_: ...}}`")
    for name in callbacks:
        if not isinstance(name, str) or any(each in name for each in ".[]"):
            raise RecipeError(f"callbacks: {name!r} cannot be a name: take a word without dots and brackets")


def _check_checkpointless(config: DictConfig) -> None:
    strategy = _value(config, "strategy._target_")
    if strategy != "nemo.lightning.MegatronStrategy":
        raise RecipeError(f"`checkpointless:` knows nemo.lightning.MegatronStrategy, not {strategy}")
    for key, least in (("memory_budget_bytes", 1), ("rng_replication_jump", 0), ("sdc_check_every", 1)):
        value = _value(config, f"checkpointless.{key}")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise RecipeError(f"checkpointless.{key} must be a whole number of at least {least}, not {value!r}")
    warm = _value(config, "checkpointless.warm")
    if warm is not None and not isinstance(warm, bool):
        raise RecipeError(f"checkpointless.warm must be true or false, not {warm!r}")
    for key in ("trainer.plugins", "model.config"):
        place = _value(config, key)
        section = _Section(place) if isinstance(place, DictConfig) else None
        reason = unsupported(section) or unabortable(section)
        if reason is not None:
            raise RecipeError(f"{key}: {reason}")
    for key in ("optim.config", "strategy.ddp"):
        if _value(config, f"{key}.overlap_param_gather_with_optimizer_step"):
            raise RecipeError(
                f"{key}.overlap_param_gather_with_optimizer_step must be false: an update that is overlapped with "
                "the parameter gather cannot be guarded"
            )


class _Section:
    def __init__(self, section: DictConfig) -> None:
        self._section = section

    def __getattr__(self, name: str) -> Any:
        return _value(self._section, name)


def _value(config: DictConfig, key: str) -> Any:
    """Return what the recipe has at a dotted key, or None if it has nothing there."""
    return None if OmegaConf.is_missing(config, key) else OmegaConf.select(config, key)


# --- The layout of a recipe's ranks, and what is refused before they start ----------------------------------------


def layout_of(config: DictConfig, nodes: int | None = None, ranks_per_node: int | None = None) -> Layout:
    """Return the layout that a recipe describes, on other numbers of nodes and ranks if they are given."""

    def size(key: str, default: int = 1) -> int:
        value = _value(config, key)
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


def _check_layout(config: DictConfig, layout: Layout) -> None:
    layers = OmegaConf.select(config, "model.config.num_layers")
    heads = OmegaConf.select(config, "model.config.num_attention_heads")
    try:
        layout.check(None if _stages_are_uneven(config) else layers, heads)
    except LayoutError as error:
        raise RecipeError(str(error)) from error


def _check_replicas(layout: Layout) -> None:
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
    strategy = str(OmegaConf.select(config, "strategy._target_", default=""))
    ours = strategy.rpartition(".")[2] == "CheckpointlessMegatronStrategy"
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


# --- The tiers that a recipe's `checkpointless:` block asks for: made from its values, and checked ----------------


def tiers_of(config: DictConfig) -> list[Tier]:
    """Return the tiers of a recipe, made from its values. Torch is imported if there are any."""
    section = OmegaConf.select(config, "checkpointless.tiers")
    if not section:
        return []
    settings: Any = OmegaConf.to_container(section, resolve=True) if isinstance(section, DictConfig) else None
    if settings is None or not all(value is None or isinstance(value, dict) for value in settings.values()):
        raise RecipeError(
            "checkpointless.tiers has to name tiers and their settings, "
            "for example {neighbor_memory: {every: 1}, shared_directory: {path: /shared/copies, every: 1000}}"
        )
    if OmegaConf.select(config, "peft") is not None:
        raise RecipeError("checkpointless.tiers: when adapters are fine-tuned no copies are kept: leave tiers out")
    from checkpointless.replication.tiers import make_tiers

    try:
        return make_tiers(settings)
    except ValueError as error:
        raise RecipeError(f"checkpointless.tiers: {error}") from error


def _tier_lines(config: DictConfig, layout: Layout) -> list[str]:
    lines = []
    for tier in tiers_of(config):
        jump = tier.distances(layout.world_size, layout.ranks_per_node)[0]
        where = f", {tier.copies} of them on other ranks, {jump} ranks apart" if tier.copies else ""
        often = "after each step" if tier.every == 1 else f"after each {tier.every} steps"
        lines.append(f"{tier.name}: {1 + tier.copies} {'copies' if tier.copies else 'copy'} {often}{where}.")
    return lines


def show(config: DictConfig, layout: Layout, console: Console) -> None:
    """Print what a recipe would start, as plain text if the console is not a terminal."""
    whole, enabled = config.copy(), checkpointless_enabled(config)
    OmegaConf.update(whole, "trainer.num_nodes", layout.nodes, force_add=True)
    OmegaConf.update(whole, "trainer.devices", layout.ranks_per_node, force_add=True)
    parts = [
        ("configuration", [OmegaConf.to_yaml(whole, resolve=True).rstrip()]),
        ("layout", _layout_lines(layout)),
        ("replicas", _replica_lines(layout, enabled, bool(tiers_of(config)))),
        ("copies in tiers", _tier_lines(config, layout) if enabled else []),
        ("yours to give", missing(config)),
    ]
    for number, (title, lines) in enumerate(part for part in parts if part[1]):
        console.print(f"\n{title}" if number else title, style="bold")
        for line in lines:
            console.print(line, soft_wrap=True)


def _layout_lines(layout: Layout) -> list[str]:
    model = f"TP {layout.tensor}, PP {layout.pipeline}, CP {layout.context}, DP {layout.data}"
    if layout.virtual_pipeline > 1:
        model += f", virtual stages {layout.virtual_pipeline}"
    lines = [
        f"ranks      {layout.world_size}: {plural(layout.nodes, 'node')} x {layout.ranks_per_node}",
        f"model      {model}",
    ]
    shards = f"{plural(layout.instances, 'instance')} of {plural(layout.shards, 'shard')}"
    if layout.expert > 1:
        expert = f"EP {layout.expert}, expert TP {layout.expert_tensor}, expert DP {layout.expert_data}"
        lines.append(f"experts    {expert}")
        shards += f", {layout.expert_shards} for the experts"
    lines.append(f"optimizer  {shards if layout.sharded else 'whole on every data-parallel rank'}")
    if layout.global_batch:
        ranks = plural(layout.data, "data-parallel rank")
        each = f"{layout.microbatches} microbatch{'es' if layout.microbatches > 1 else ''} of {layout.micro_batch}"
        lines.append(f"batch      {layout.global_batch}: {ranks} x {each}")
    return lines


def _replica_lines(layout: Layout, enabled: bool, has_copies: bool = False) -> list[str]:
    """Describe which ranks hold the same shard, and which losses the job survives, with copies in tiers or not."""
    groups = layout.replica_groups()
    holders = sorted({len(group) for group in groups})
    lines = [] if enabled else ["checkpointless is off in this recipe: nothing is recovered from memory."]
    if holders == [1]:
        fate = "comes from a copy in tiers" if enabled and has_copies else "is lost with its process"
        return [*lines, f"No replicas: a shard has one holder, and {fate}."]
    lines += [
        f"{plural(len(groups), 'replica group')} of {' or '.join(map(str, holders))} ranks, the first: "
        f"{numbered('rank', groups[0])} ({layout.ranks_per_node} ranks are a node).",
        f"The death of a process: survivable. {holders[0] - 1} of the {holders[0]} holders of a shard may die.",
    ]
    lost = layout.lost_with_a_node()
    if layout.nodes == 1:
        return [*lines, "The loss of the node: not survivable, there is no other."]
    if lost:
        return [
            *lines,
            f"The loss of a whole node: NOT survivable. {len(lost)} of {len(groups)} groups have all their holders "
            f"on one node, {numbered('rank', lost[0])} for example. Use more nodes, or smaller parallel sizes.",
        ]
    return [
        *lines,
        "The loss of a whole node: survivable, any one. The holders of each shard are on different nodes.",
    ]
