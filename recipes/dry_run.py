"""What `checkpointless train --dry-run` shows: recipe, layout, replicas, memory and how to launch it."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from checkpointless.environment import TOKEN_ENV
from checkpointless.layout import Layout
from checkpointless.recipes.memory import GIB, Memory, Precision, Stage, fullest, memory, precision_of
from checkpointless.recipes.settings import missing
from checkpointless.recipes.tiers import copy_bytes, tier_lines, tiers_of

_PORT = 29400


@dataclass(frozen=True)
class Plan:
    """The job that would be started.

    Attributes:
        recipe: the recipe as the user named it.
        overrides: the overrides, each as `key=value`.
        config: the recipe with its overrides.
        layout: the layout of its ranks.
        stages: the parameters on each GPU of every pipeline stage, or one line that says why they are not known.
        enabled: whether the job recovers from faults.
        cpu: whether the job trains on CPUs.
    """

    recipe: str
    overrides: tuple[str, ...]
    config: DictConfig
    layout: Layout
    stages: list[Stage] | str
    enabled: bool
    cpu: bool


def show(plan: Plan, console: Console) -> None:
    """Print the whole plan, as plain text if the console is not a terminal."""
    config = plan.config.copy()
    OmegaConf.update(config, "trainer.num_nodes", plan.layout.nodes, force_add=True)
    OmegaConf.update(config, "trainer.devices", plan.layout.ranks_per_node, force_add=True)
    console.print("configuration", style="bold")
    console.print(OmegaConf.to_yaml(config, resolve=True).rstrip(), soft_wrap=True)
    _headline(console, "layout")
    for name, value in layout_rows(plan.layout):
        console.print(f"{name:<10} {value}", soft_wrap=True)
    _headline(console, "replicas")
    for line in replica_lines(plan.layout, plan.enabled, bool(tiers_of(plan.config))):
        console.print(line, soft_wrap=True)
    _headline(console, "memory of the state, per GPU" if not plan.cpu else "memory of the state, per rank")
    for part in memory_lines(plan):
        console.print(part, soft_wrap=isinstance(part, str))
    lines = tier_lines(plan.config, plan.layout, _bytes_of_a_copy(plan)) if plan.enabled else []
    if lines:
        _headline(console, "copies in tiers")
        for line in lines:
            console.print(line, soft_wrap=True)
    _headline(console, "launch")
    for line in launch_lines(plan):
        console.print(line, soft_wrap=True)


def layout_rows(layout: Layout) -> list[tuple[str, str]]:
    """Return the parallel sizes of a job, each with its name."""
    sizes = [("TP", layout.tensor), ("PP", layout.pipeline), ("CP", layout.context), ("DP", layout.data)]
    if layout.virtual_pipeline > 1:
        sizes.insert(2, ("virtual stages", layout.virtual_pipeline))
    rows = [
        ("ranks", f"{layout.world_size}: {_many(layout.nodes, 'node')} x {layout.ranks_per_node}"),
        ("model", ", ".join(f"{name} {size}" for name, size in sizes)),
    ]
    shards = f"{_many(layout.instances, 'instance')} of {_many(layout.shards, 'shard')}"
    if layout.expert > 1:
        sizes = [("EP", layout.expert), ("expert TP", layout.expert_tensor), ("expert DP", layout.expert_data)]
        rows.append(("experts", ", ".join(f"{name} {size}" for name, size in sizes)))
        shards += f", {layout.expert_shards} for the experts"
    rows.append(("optimizer", shards if layout.sharded else "whole on every data-parallel rank"))
    if not layout.global_batch:
        return rows
    steps = f"{layout.microbatches} microbatch{'es' if layout.microbatches > 1 else ''} of {layout.micro_batch}"
    rows.append(("batch", f"{layout.global_batch}: {_many(layout.data, 'data-parallel rank')} x {steps}"))
    return rows


def replica_lines(layout: Layout, enabled: bool, has_copies: bool = False) -> list[str]:
    """Describe which ranks hold the same shard, and which losses the job survives.

    Args:
        layout: the layout of the ranks.
        enabled: whether the job recovers from faults.
        has_copies: whether copies are kept in tiers.
    """
    groups = layout.replica_groups()
    sizes = sorted({len(group) for group in groups})
    first = groups[0]
    lines = []
    if not enabled:
        lines.append("checkpointless is off in this recipe: nothing is recovered from memory.")
    if sizes == [1]:
        fate = "comes from a copy in tiers" if enabled and has_copies else "is lost with its process"
        return [*lines, f"No replicas: each of the {len(groups)} shards has one holder, and {fate}."]
    distances = {b - a for a, b in itertools.pairwise(first)}
    apart = f", {distances.pop()} ranks apart" if len(distances) == 1 else ""
    lines.append(
        f"{_many(len(groups), 'replica group')} of {' or '.join(map(str, sizes))} ranks{apart} "
        f"({layout.ranks_per_node} ranks are a node): {_ranks(first)}, {_ranks(groups[-1])}"
        if len(groups) > 1
        else f"1 replica group: {_ranks(first)}"
    )
    lines.append(
        f"The death of a process: survivable. {sizes[0] - 1} of the {sizes[0]} holders of a shard may die."
    )
    lost = layout.lost_with_a_node()
    if layout.nodes == 1:
        lines.append("The loss of the node: not survivable, there is no other.")
    elif lost:
        lines.append(
            f"The loss of a whole node: NOT survivable. {len(lost)} of {len(groups)} groups have all their holders "
            f"on one node, {_ranks(lost[0])} for example. Use more nodes, or smaller parallel sizes."
        )
    else:
        lines.append(
            "The loss of a whole node: survivable, any one. The holders of each shard are on different nodes."
        )
    return lines


def memory_lines(plan: Plan) -> list[str | Table]:
    """Describe how much memory the state takes, with and without replicas."""
    if isinstance(plan.stages, str):
        return [f"not known: {plan.stages}"]
    layout, precision = plan.layout, precision_of(plan.config)
    number, most = fullest(plan.stages, layout, precision)
    whole, trained = sum(stage.whole for stage in plan.stages), _trained(plan.stages)
    lines: list[str | Table] = [
        f"{whole:,} parameters in all{'' if trained else ', most of them frozen'}. {_on_each(plan.stages, number)}",
        memory_table(most, precision, layout.instances),
    ]
    if layout.sharded and layout.instances > 1:
        lines.append(f"The cost of the replica is {_size(most.replica)} on each GPU.".replace("GPU", _unit(plan)))
    elif not layout.sharded:
        lines.append("Replicas cost nothing: the optimizer is whole on every data-parallel rank anyway.")
    others = [memory(stage, layout, precision).total for stage in plan.stages]
    if min(others) != max(others):
        lines.append(f"On the other pipeline stages it is down to {_size(min(others))}.")
    budget = OmegaConf.select(plan.config, "checkpointless.memory_budget_bytes")
    if plan.enabled and budget is not None:
        lines.append(f"While a rank is filled, buffers take at most {_size(budget)} more.")
    lines.append("Activations, buffers of collectives and CUDA's own are not in it.")
    return lines


def _bytes_of_a_copy(plan: Plan) -> int | None:
    """Return how many bytes a copy of the state takes on the fullest rank; None if that is not known."""
    if isinstance(plan.stages, str):
        return None
    precision = precision_of(plan.config)
    _, most = fullest(plan.stages, plan.layout, precision)
    return copy_bytes(most, precision, plan.layout)


def memory_table(size: Memory, precision: Precision, instances: int) -> Table:
    """Tabulate how much memory each part of the state takes, with and without replicas."""
    kinds = {2: "16 bit", 4: "32 bit"}
    what = "Adam" if precision.parameter == 4 else "Adam and master weights"
    table = Table("", box=None, pad_edge=False)
    columns = ["one copy"] + ([f"{instances} copies"] if instances > 1 else [])
    for column in columns:
        table.add_column(column, justify="right")
    rows = [
        (f"parameters, {kinds[precision.parameter]}", size.parameters, size.parameters),
        (f"gradients, {kinds[precision.gradient]}", size.gradients, size.gradients),
        (f"optimizer, {what}, 32 bit", size.optimizer_without_replicas, size.optimizer),
        ("together", size.total - size.replica, size.total),
    ]
    for name, *sizes in rows:
        table.add_row(name, *(_size(each) for each in sizes[: len(columns)]))
    return table


def launch_lines(plan: Plan) -> list[str]:
    """Return the command for each node, after the values that the user still has to give."""
    layout = plan.layout
    lines = []
    absent = missing(plan.config)
    if absent:
        lines.append(f"Yours to give: {', '.join(absent)}.")
    words = ["checkpointless", "train", plan.recipe, *(["--cpu"] if plan.cpu else [])]
    values = [*plan.overrides, *(f"{key}=..." for key in absent)]
    quoted = " ".join(shlex.quote(value) for value in values)
    if layout.nodes == 1:
        return [*lines, " ".join([*words, "--nproc-per-node", str(layout.ranks_per_node), quoted]).rstrip()]
    words += ["--nnodes", str(layout.nodes), "--nproc-per-node", str(layout.ranks_per_node)]
    words += ["--node-rank", "I", "--rdzv-endpoint", f"NODE0:{_PORT}", "--run-dir", "DIR", quoted]
    return [
        *lines,
        f"On each of the {layout.nodes} nodes, I being 0 to {layout.nodes - 1}, NODE0 the first node's name, DIR a "
        f"folder that all see, and {TOKEN_ENV} the same secret everywhere:",
        " ".join(words).rstrip(),
        "With --spares S on all, and nodes beyond the last, these wait to replace a lost one.",
    ]


def _on_each(stages: Sequence[Stage], number: int) -> str:
    """Describe in words what the fullest GPU holds."""
    stage = stages[number]
    held = stage.dense.total + stage.expert.total
    trained = stage.dense.trained + stage.expert.trained
    where = (
        f"each rank of pipeline stage {number + 1} of {len(stages)}, the fullest"
        if len(stages) > 1
        else "every rank"
    )
    return f"On {where}: {held:,}" + (f", {trained:,} of them trained." if trained != held else ".")


def _trained(stages: Sequence[Stage]) -> bool:
    """Return whether all parameters are trained."""
    counts = [count for stage in stages for count in (stage.dense, stage.expert)]
    return all(count.total == count.trained for count in counts)


def _unit(plan: Plan) -> str:
    return "rank" if plan.cpu else "GPU"


def _headline(console: Console, text: str) -> None:
    console.print(f"\n{text}", style="bold")


def _ranks(group: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, group[:-1]))} and {group[-1]}" if len(group) > 1 else f"rank {group[0]}"


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB // 100 else f"{nbytes / 2**20:.2f} MiB"
