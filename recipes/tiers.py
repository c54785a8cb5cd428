"""The tiers that a recipe's `checkpointless:` block asks for: made from its values, and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from checkpointless.recipes.settings import RecipeError
from checkpointless.system.layout import Layout

if TYPE_CHECKING:
    from checkpointless.recovery import Tier


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


def tier_lines(config: DictConfig, layout: Layout) -> list[str]:
    """Describe the tiers of a recipe.

    Args:
        config: the recipe.
        layout: the layout of its ranks.

    Raises:
        RecipeError: a tier cannot be made.
    """
    lines = []
    for tier in tiers_of(config):
        jump = tier.distances(layout.world_size, layout.ranks_per_node)[0]
        where = f", {tier.copies} of them on other ranks, {jump} ranks apart" if tier.copies else ""
        often = "after each step" if tier.every == 1 else f"after each {tier.every} steps"
        lines.append(f"{tier.name}: {1 + tier.copies} {'copies' if tier.copies else 'copy'} {often}{where}.")
    return lines
