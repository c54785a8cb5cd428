"""Switches recovery on in a recipe of NeMo's collection."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nemo_run as run

    from checkpointless.strategies.nemo_run.recipe import CheckpointlessRecipe


def enable(
    recipe: run.Partial,
    replicas: int | None = None,
    *,
    enable_checksum: bool = False,
    wrapper: run.Config | None = None,
) -> CheckpointlessRecipe:
    """Make a pretrain or finetune recipe of ``nemo.collections.llm`` recover from faults without a checkpoint.

    The recipe itself is changed, as by NeMo's own functions that take one; it can be shown, edited, serialised and
    run as before. Enabling it again changes nothing. What is put into it later is switched on when it runs.

    Args:
        recipe: the recipe, for example what ``llm.llama3_8b.pretrain_recipe(...)`` returns.
        replicas: the number of ranks that hold each shard of the optimizer. Default: what the recipe has, but at
            least 2. Without the distributed optimizer, as in most LoRA recipes, all data-parallel ranks hold it
            anyway.
        enable_checksum: compare the replicas before a recovery.
        wrapper: settings of the block that is entered again, as a ``run.Config`` of
            :class:`checkpointless.inprocess.HPWrapper`.

    Returns:
        The recipe.

    Raises:
        TypeError: ``recipe`` is not a ``run.Partial``.
        ValueError: the recipe cannot recover as it is, and is left unchanged; the message is one line that says
            what to change.
    """
    # A script that uses the strategy without NeMo-Run need not import NeMo-Run.
    import nemo_run as run

    from checkpointless.strategies.nemo_run.changes import switch_on
    from checkpointless.strategies.nemo_run.recipe import CheckpointlessRecipe

    if not isinstance(recipe, run.Partial):
        raise TypeError(f"enable() takes a run.Partial, as NeMo's recipes return it, not {type(recipe).__name__}")
    switch_on(recipe, replicas, enable_checksum)
    return CheckpointlessRecipe.adopt(recipe, wrapper)
