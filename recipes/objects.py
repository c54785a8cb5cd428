"""Makes the objects that a recipe describes.

The keys are Hydra's: `_target_`, `_args_`, `_partial_` and `_recursive_`. Containers are always plain, as with its
`_convert_="all"`. Hydra itself copies, merges and resolves the configuration of each object, which was two thirds
of what a rank needed to have the objects of `tiny_gpt_cpu` ready again after a fault.
"""

import functools
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from checkpointless.recipes.settings import RecipeError, first_line

_TARGET, _ARGS, _PARTIAL, _RECURSIVE = "_target_", "_args_", "_partial_", "_recursive_"
_OWN_KEYS = frozenset({_TARGET, _ARGS, _PARTIAL, _RECURSIVE, "_convert_"})


class ObjectError(RecipeError):
    """Raised if an object cannot be made; the message is one line, the cause what its target raised."""


def make(config: DictConfig, key: str, **objects: object) -> object:
    """Make what a part of a recipe describes.

    Args:
        config: the recipe.
        key: dotted key of the part. What has a `_target_` in it becomes what that returns.
        objects: further arguments of the part's own target; they take the place of those in the recipe.

    Returns:
        The object, or a new container of what its items describe; None if the recipe does not have the part.

    Raises:
        ObjectError: a target cannot be imported, cannot be called, or has raised.
        OmegaConfBaseException: a value is missing or cannot be resolved.
    """
    part = OmegaConf.select(config, key)
    if not OmegaConf.is_config(part):
        return part
    return _made(OmegaConf.to_container(part, resolve=True, throw_on_missing=True), key, True, objects)


def _made(node: Any, where: str, recursive: bool, objects: dict[str, object]) -> Any:
    if isinstance(node, list):
        return [_made(each, f"{where}[{index}]", recursive, {}) for index, each in enumerate(node)]
    if not isinstance(node, dict):
        return node
    recursive = node.get(_RECURSIVE, recursive)
    if _TARGET not in node:
        return {name: _made(value, f"{where}.{name}", recursive, {}) for name, value in node.items()}
    called = _called(node[_TARGET], where)
    args = node.get(_ARGS, [])
    given = {name: value for name, value in node.items() if name not in _OWN_KEYS and name not in objects}
    if recursive:
        args = _made(args, f"{where}.{_ARGS}", True, {})
        given = {name: _made(value, f"{where}.{name}", True, {}) for name, value in given.items()}
    try:
        if node.get(_PARTIAL, False):
            return functools.partial(called, *args, **given, **objects)
        return called(*args, **given, **objects)
    except Exception as error:
        raise ObjectError(f"{where}: {first_line(error)}") from error


def _called(target: Any, where: str) -> Any:
    try:
        found = get_object(target)
    except Exception as error:
        raise ObjectError(f"{where}: _target_ {target} cannot be imported: {first_line(error)}") from error
    if not callable(found):
        raise ObjectError(f"{where}: _target_ {target} cannot be called")
    return found
