"""The tiers that a recipe's `checkpointless:` block asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from checkpointless.recipes.settings import RecipeError

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
        raise RecipeError(
            "checkpointless.tiers: fine-tuning with adapters keeps no copies in tiers: leave them out"
        )
    from checkpointless.recovery.tiers.table import make_tiers

    try:
        return make_tiers(settings)
    except ValueError as error:
        raise RecipeError(f"checkpointless.tiers: {error}") from error
