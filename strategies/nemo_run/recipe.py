"""A NeMo-Run recipe whose objects are made inside the block that is executed again, not before it."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable
from typing import Any

import fiddle as fdl
import nemo_run as run
import yaml
from fiddle.experimental import serialization
from nemo_run.config import register_supported_cast
from typing_extensions import override

from checkpointless.inprocess import HPWrapper
from checkpointless.integrations.megatron import cpu_platform
from checkpointless.strategies.nemo_run.changes import switch_on


class Unbuilt:
    """Holds a recipe so that Fiddle makes no objects of it: Fiddle does not look inside.

    Args:
        recipe: the recipe as NeMo made it.
    """

    def __init__(self, recipe: run.Partial) -> None:
        self.recipe = recipe

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unbuilt) and self.recipe == other.recipe

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Unbuilt({self.recipe!r})"


def train(recipe: Unbuilt, wrapper: HPWrapper | None = None) -> object:
    """Make the objects of a recipe and train it, and do so again in the same process after every fault.

    Args:
        recipe: the recipe that a :class:`CheckpointlessRecipe` holds. What was put into it after it was enabled, a
            strategy for example, is switched on, too.
        wrapper: the wrapper with its settings. None: ``HPWrapper()``.

    Returns:
        What the recipe's function returns.

    Raises:
        ValueError: the recipe cannot recover, or cannot on the ranks that the job has.
    """
    if cpu_platform.requested():
        cpu_platform.install()
    plain = copy.deepcopy(recipe.recipe)
    switch_on(plain)
    return (wrapper or HPWrapper())(_build_and_call)(plain)


def _build_and_call(recipe: run.Partial) -> object:
    """Build and run a recipe: the block that is executed again. Values that are no configurations are copied."""
    return fdl.build(copy.deepcopy(recipe))()


class CheckpointlessRecipe(run.Partial):
    """A recipe that is shown and edited like any other and that, when run, calls :func:`train` with itself unbuilt.

    Fiddle makes the objects of a recipe once, before it calls the function. Wherever it takes this recipe apart, it
    sees a call of :func:`train` with one opaque argument instead. The recipe has the same attributes as before.
    """

    @classmethod
    def adopt(cls, recipe: run.Partial, wrapper: run.Config | None) -> CheckpointlessRecipe:
        """Turn ``recipe`` itself into a ``CheckpointlessRecipe``.

        Args:
            recipe: any recipe.
            wrapper: a configuration of :class:`HPWrapper`. None: the one it already has, or else ``HPWrapper()``.
        """
        object.__setattr__(recipe, "__class__", cls)
        if wrapper is not None or "_wrapper" not in vars(recipe):
            object.__setattr__(recipe, "_wrapper", wrapper)
        assert isinstance(recipe, cls)
        return recipe

    def plain(self) -> run.Partial:
        """Return an ordinary ``run.Partial`` with the same arguments, which NeMo-Run would run without re-entry."""
        return run.Partial.__unflatten__(*super().__flatten__())

    @override
    def visualize(self, **kwargs: Any) -> Any:
        """Visualize the recipe like any other."""
        return self.plain().visualize(**kwargs)

    @override
    def diff(self, old: Any, trim: bool = True, **kwargs: Any) -> Any:
        """Compare the recipe with ``old`` like any other."""
        old = old.plain() if isinstance(old, CheckpointlessRecipe) else old
        return self.plain().diff(old, trim=trim, **kwargs)

    @override
    def __flatten__(self) -> tuple[tuple[Any, ...], Any]:
        call = run.Partial(train, bind_args=False, recipe=self._unbuilt(), wrapper=vars(self)["_wrapper"])
        return call.__flatten__()

    def _unbuilt(self) -> Unbuilt:
        """Return the same object until an argument is replaced: Fiddle knows what it has visited by identity."""
        plain = self.plain()
        kept: Unbuilt | None = vars(self).get("_kept")
        if kept is None or not _has_the_same_arguments(kept.recipe, plain):
            kept = Unbuilt(plain)
            object.__setattr__(self, "_kept", kept)
        return kept

    @override
    def __path_elements__(self) -> tuple[Any, ...]:
        return _Part("recipe"), _Part("wrapper")

    @classmethod
    @override
    def __unflatten__(cls, values: Iterable[Any], metadata: Any) -> Any:
        arguments = metadata.arguments(values)
        if not isinstance(arguments["recipe"], Unbuilt):
            return _Elsewhere()
        return cls.adopt(copy.copy(arguments["recipe"].recipe), arguments["wrapper"])

    @override
    def __build__(self, *args: Any, **kwargs: Any) -> Any:
        built = fdl.Partial.__build__(run.Partial(train), *args, **kwargs)
        built.keywords["recipe"] = copy.deepcopy(built.keywords["recipe"])
        return built


class _Part(fdl.daglish.Attr):
    """Names a part of an enabled recipe that Fiddle sees and that is not an attribute of the recipe."""

    @override
    def follow(self, container: Any) -> Any:
        values, metadata = container.__flatten__()
        return metadata.arguments(values)[self.name]


class _Elsewhere:
    """Stands for what two recipes have in common when Fiddle compares them, and asks it for what is in it."""

    def __getattr__(self, name: str) -> str:
        return f"recipe.{name}"


def _has_the_same_arguments(one: run.Partial, other: run.Partial) -> bool:
    values, metadata = one.__flatten__()
    other_values, other_metadata = other.__flatten__()
    return metadata == other_metadata and all(map(operator.is_, values, other_values))


serialization.register_node_traverser(
    Unbuilt,
    flatten_fn=lambda value: ((value.recipe,), None),
    unflatten_fn=lambda values, _: Unbuilt(*values),
    path_elements_fn=lambda _: (fdl.daglish.Attr("recipe"),),
)
register_supported_cast(CheckpointlessRecipe, run.Partial)
yaml.SafeDumper.add_representer(CheckpointlessRecipe, lambda dumper, recipe: dumper.represent_data(recipe.plain()))
