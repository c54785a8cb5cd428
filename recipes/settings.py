"""Reads a recipe, which is a YAML file with `key=value` overrides, and reports each error in one line."""

import difflib
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

RECIPES = Path(__file__).parent
RECIPE_RUNNER = "checkpointless.recipes.runner"
RECIPE_PRELOAD = (
    "nemo.collections.llm",
    "checkpointless.strategies.CheckpointlessMegatronStrategy",
    "checkpointless.callbacks.CheckpointlessCallback",
    "checkpointless.recovery.CheckpointManager",
    "torch._dynamo",  # which the first optimizer of a process imports
    "torch.distributed.tensor.debug",  # and its first fault
    RECIPE_RUNNER,
)

#: Recipes that were read before this process was forked, by name.
_remembered: dict[str, DictConfig] = {}


class RecipeError(ValueError):
    """Raised if a recipe or an override cannot be used; the message is one line that says what to do."""


def available() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Read a recipe and apply overrides to it.

    Args:
        recipe: a YAML file, or the name of a recipe that comes with the package.
        overrides: the overrides, each as `key=value`, where `key` is a dotted path and `value` is YAML. A key must
            already be in the recipe, or be a parameter of the `_target_` that its parent names.

    Raises:
        RecipeError: the file does not exist or is not a recipe, or an override has an unknown key or a wrong value.
    """
    config = _remembered.pop(str(recipe), None) or _read(recipe)
    for override in overrides:
        _override(config, override)
    try:
        OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise RecipeError(f"{recipe}: {first_line(error)}") from error
    return config


def remember(recipe: str | Path) -> DictConfig:
    """Read a recipe for processes that are forked from this one: there, :func:`load` does not read it again.

    So a rank that takes a lost one's place trains what the others train, whatever has become of the file. Nothing
    is imported: what the user wrote belongs to the ranks. The recipe is returned without overrides.
    """
    config = _remembered[str(recipe)] = _read(recipe)
    return config


def checkpointless_enabled(config: DictConfig) -> bool:
    """Return whether the recipe has a `checkpointless:` block that is not switched off."""
    return bool(OmegaConf.select(config, "checkpointless.enabled", default="checkpointless" in config))


def missing(config: DictConfig) -> list[str]:
    """Return the keys that the recipe leaves to its user (`???`) and that have no value yet."""
    return sorted(OmegaConf.missing_keys(config))


def require_complete(config: DictConfig, recipe: str | Path) -> None:
    """Raise a RecipeError that names the keys that the recipe leaves to its user, if some have no value."""
    keys = missing(config)
    if keys:
        given = " ".join(f"{key}=..." for key in keys)
        raise RecipeError(f"{recipe} leaves {len(keys)} value{'s' * (len(keys) > 1)} to you: add {given}")


def needs_gpu(config: DictConfig) -> bool:
    """Return whether the recipe trains on GPUs only."""
    return str(OmegaConf.select(config, "trainer.accelerator", default="auto")) in ("gpu", "cuda")


def preloads_of(config: DictConfig) -> tuple[str, ...]:
    """Return the installed modules that a recipe names, to be imported once, before ranks are forked."""
    from checkpointless.launcher.agent.ranks.preload import installed

    found: set[str] = set()
    due: list[object] = [OmegaConf.to_container(config)]
    while due:
        each = due.pop()
        if isinstance(each, dict):
            target = each.get("_target_")
            of_hydra = str(target).startswith("hydra.utils.")  # get_object and the like, which take a path
            found.update(name for name in (target, each.get("path") if of_hydra else None) if _is_dotted(name))
        if isinstance(each, dict | list):
            due += each.values() if isinstance(each, dict) else each
    more = set(installed(found, Path.cwd())) - set(RECIPE_PRELOAD)
    return *RECIPE_PRELOAD, *sorted(more)


def _is_dotted(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and "." in value and all(part.isidentifier() for part in value.split("."))


def _parameters(target: str) -> set[str]:
    """Return the parameters that the callable `target` takes, including those that it passes on to base classes."""
    from hydra.utils import get_object

    try:
        called = get_object(target)
    except Exception as error:
        raise RecipeError(f"_target_ {target} cannot be imported: {first_line(error)}") from error
    names: set[str] = set()
    for function in called.__mro__ if inspect.isclass(called) else (called,):
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            continue
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        names |= set(signature.parameters)
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return names - {"self", "args", "kwargs"}


def _read(recipe: str | Path) -> DictConfig:
    path = Path(recipe)
    if not path.suffix and not path.exists():
        path = RECIPES / f"{recipe}.yaml"
    try:
        config = OmegaConf.load(path)
    except FileNotFoundError:
        hint = (
            _suggestion(path.stem, available()) or f"; recipes that come with the package: {', '.join(available())}"
        )
        raise RecipeError(f"no recipe {recipe}{hint}") from None
    except OSError as error:
        raise RecipeError(f"cannot read recipe {recipe}: {error.strerror or error}") from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark is not None else ""
        raise RecipeError(f"{recipe} is not YAML: {line}{error.problem or first_line(error)}") from error
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException, RecursionError) as error:
        raise RecipeError(f"{recipe} is not YAML: {first_line(error)}") from error
    if not isinstance(config, DictConfig) or "trainer" not in config:
        raise RecipeError(f"{recipe} is not a recipe: it has no `trainer:`")
    return config


def _override(config: DictConfig, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise RecipeError(f"{override!r} is not an override: write key=value, for example trainer.max_steps=10")
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise RecipeError(f"{key}: {text[:80]!r} is not a YAML value: {first_line(error)}") from error
    value = parsed["value"]
    parent = _parent(config, key)
    name = key.rsplit(".", 1)[-1]
    if OmegaConf.is_missing(parent, name):
        pass  # the recipe leaves the value to its user
    elif name in parent:
        values: Any = OmegaConf.to_container(parent, resolve=False)
        _check_value(key, None if OmegaConf.is_interpolation(parent, name) else values[name], value)
    elif key != "callbacks." + name:
        _check_name(parent, key, name)
    OmegaConf.update(config, key, value, merge=isinstance(value, dict) and "_target_" not in value)


def _parent(config: DictConfig, key: str) -> DictConfig:
    node: Any = config
    parts = key.split(".")
    for depth, part in enumerate(parts[:-1]):
        if part not in node:
            where = ".".join(parts[: depth + 1])
            raise RecipeError(f"no key {where} in the recipe{_suggestion(part, map(str, node), parts[:depth])}")
        node = None if OmegaConf.is_missing(node, part) else node[part]
        if not isinstance(node, DictConfig):
            raise RecipeError(f"{'.'.join(parts[: depth + 1])} has no keys of its own, so {key} cannot be set")
    return node


def _check_name(parent: DictConfig, key: str, name: str) -> None:
    target = parent.get("_target_")
    known = set(map(str, parent)) | (_parameters(target) if target else set())
    if name not in known:
        where = "the recipe" if target is None else f"the recipe, nor a parameter of {target}"
        raise RecipeError(f"no key {key} in {where}{_suggestion(name, known, key.split('.')[:-1])}")


def _check_value(key: str, old: Any, new: Any) -> None:
    """Raise if `new` is of another kind than the recipe's `old` value; null and objects may replace any value."""
    if isinstance(new, dict) and "_target_" in new:
        return
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a mapping"}
    if old is None or new is None or type(old) not in kinds or (isinstance(new, str) and "${" in new):
        return
    if isinstance(old, float) and isinstance(new, int) and not isinstance(new, bool):
        return
    if type(old) is not type(new):
        raise RecipeError(f"{key} must be {kinds[type(old)]}, not {new!r}")


def _suggestion(word: str, known: Iterable[str], prefix: Sequence[str] = ()) -> str:
    matches = difflib.get_close_matches(word, sorted(set(known)), n=1)
    return f"; did you mean {'.'.join([*prefix, matches[0]])}?" if matches else ""


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says, or the name of its class; a bare key with that name."""
    if type(error) is KeyError:
        return f"KeyError: {error}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
