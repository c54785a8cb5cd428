"""What `checkpointless train --dry-run` shows: recipe, layout, replicas, and what is still to be given."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from checkpointless.observability.telemetry.wording import numbered, plural
from checkpointless.recipes.checks import tier_lines, tiers_of
from checkpointless.recipes.settings import checkpointless_enabled, missing
from checkpointless.system.layout import Layout


def show(config: DictConfig, layout: Layout, console: Console) -> None:
    """Print what a recipe would start, as plain text if the console is not a terminal.

    Args:
        config: the recipe with its overrides.
        layout: the layout of its ranks.
        console: where it is printed.
    """
    whole, enabled = config.copy(), checkpointless_enabled(config)
    OmegaConf.update(whole, "trainer.num_nodes", layout.nodes, force_add=True)
    OmegaConf.update(whole, "trainer.devices", layout.ranks_per_node, force_add=True)
    parts = [
        ("configuration", [OmegaConf.to_yaml(whole, resolve=True).rstrip()]),
        ("layout", _layout_lines(layout)),
        ("replicas", replica_lines(layout, enabled, bool(tiers_of(config)))),
        ("copies in tiers", tier_lines(config, layout) if enabled else []),
        ("yours to give", missing(config)),
    ]
    for number, (title, lines) in enumerate(part for part in parts if part[1]):
        console.print(f"\n{title}" if number else title, style="bold")
        for line in lines:
            console.print(line, soft_wrap=True)


def _layout_lines(layout: Layout) -> list[str]:
    """Describe the parallel sizes of a job."""
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


def replica_lines(layout: Layout, enabled: bool, has_copies: bool = False) -> list[str]:
    """Describe which ranks hold the same shard, and which losses the job survives.

    Args:
        layout: the layout of the ranks.
        enabled: whether the job recovers from faults.
        has_copies: whether copies are kept in tiers.
    """
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
