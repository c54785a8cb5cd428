"""Pass the running wrapper to the parameter of a block that asks for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_ANYTHING = ("Any", "typing.Any", "object")


def with_caller(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], caller: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``fn``, with ``caller`` filled in if its parameter was omitted or None.

    The parameter for ``caller`` is the first one that is annotated ``HPCallWrapper``, ``Optional[HPCallWrapper]``
    or similar, or that is named ``caller`` and has no annotation (or one that allows anything).
    """
    try:
        signature = inspect.signature(fn)
    except ValueError:  # fn is a built-in
        return args, kwargs
    name = next((each.name for each in signature.parameters.values() if _wants_caller(each)), None)
    if name is None:
        return args, kwargs
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError:  # fn itself reports what is wrong
        return args, kwargs
    if bound.arguments.get(name) is None:
        bound.arguments[name] = caller
    return bound.args, bound.kwargs


def _wants_caller(parameter: inspect.Parameter) -> bool:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return False
    annotation = parameter.annotation
    if "HPCallWrapper" in str(annotation):
        return True
    anything = annotation is inspect.Parameter.empty or annotation in (Any, object) or annotation in _ANYTHING
    return parameter.name == "caller" and anything
