"""The tiers that a recipe's `checkpointless:` block asks for: made from its values, checked, and what they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from checkpointless.recipes.memory import Memory, Precision
from checkpointless.recipes.settings import RecipeError
from checkpointless.system.layout import Layout

if TYPE_CHECKING:
    from checkpointless.recovery import Tier

_SINGLE = 4  # bytes of a number in fp32


def tiers_of(config: DictConfig) -> list[Tier]:
    """Return the tiers of a recipe, made from its values. Torch is imported if there are any.

    Raises:
        RecipeError: a tier is not known, or cannot be made from what the recipe gives it.
    """
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
    from checkpointless.replication.tiers.tier import make_tiers

    try:
        return make_tiers(settings)
    except ValueError as error:
        raise RecipeError(f"checkpointless.tiers: {error}") from error


def check_tiers(config: DictConfig, layout: Layout) -> None:
    """Raise if the ranks cannot keep copies as the recipe's tiers want.

    Args:
        config: the recipe.
        layout: the layout of its ranks.

    Raises:
        RecipeError: a tier cannot be made, or the ranks cannot be divided; the message is one line.
    """
    for tier in tiers_of(config):
        try:
            tier.distances(layout.world_size, layout.ranks_per_node)
        except ValueError as error:
            raise RecipeError(f"checkpointless.tiers: {error}") from error


def copy_bytes(size: Memory, precision: Precision, layout: Layout) -> int:
    """Return how many bytes of tensors a copy of a rank's state takes.

    It has what no gather makes of other ranks' shards: the optimizer and, in fp32, its part of the parameters.

    Args:
        size: the memory that the state takes on a rank.
        precision: the precision of the job.
        layout: the layout of its ranks.
    """
    if precision.parameter != _SINGLE:
        return size.optimizer
    return size.optimizer + size.parameters // (layout.shards if layout.sharded else 1)


def tier_lines(config: DictConfig, layout: Layout, nbytes: int | None) -> list[str]:
    """Describe the tiers of a recipe, and what they cost each rank.

    Args:
        config: the recipe.
        layout: the layout of its ranks.
        nbytes: the bytes of a copy of a rank's state, on the rank that holds the most; None: they are not known.

    Raises:
        RecipeError: a tier cannot be made.
    """
    lines = []
    for tier in tiers_of(config):
        jump = tier.distances(layout.world_size, layout.ranks_per_node)[0]
        where = f", {tier.copies} of them on other ranks, {jump} ranks apart" if tier.copies else ""
        often = "after each step" if tier.every == 1 else f"after each {tier.every} steps"
        lines.append(f"{tier.name}: {1 + tier.copies} {'copies' if tier.copies else 'copy'} {often}{where}.")
        if nbytes is None:
            continue
        gib, kept = nbytes / 2**30, 2 * (1 + tier.copies)
        takes = f"{kept} parts of {gib:.3g} GiB" if tier.is_memory or tier.copies else f"2 parts of {gib:.3g} GiB"
        place = "host memory of each rank" if tier.is_memory else "directory, for each rank"
        sent = f"; {gib * tier.copies:.3g} GiB are sent each time" if tier.copies else ""
        lines.append(f"  It takes {takes} in the {place}{sent}.")
    return lines
