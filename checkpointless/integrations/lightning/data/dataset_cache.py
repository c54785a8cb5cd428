"""A cache of what Megatron's dataset builder makes, so that a process that lives through a fault builds it once.

Indices over a large corpus take seconds to minutes. Megatron's datasets follow from the builder's arguments alone
(``blended_megatron_dataset_builder.py`` of Megatron-core 0.12 to 0.16), and nothing writes to them later.
"""

from __future__ import annotations

import enum
import functools
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from checkpointless.inprocess import HPCallWrapper, active_call_wrapper
from checkpointless.inprocess.wrap import emit_event
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.system.patches import Patch, Patches
from checkpointless.transfer.exchange import true_on_all

_PLAIN = (bool, int, float, str, bytes, type(None), enum.Enum, type)
_WHY = "a survivor of a fault gets the datasets that it has built already"
_patches = Patches()


@dataclass
class _Built:
    """Datasets that were built."""

    arguments: object
    datasets: list[Any]
    generation: int


class _Same:
    """Compares an object without a plain value by its identity, and keeps it, so that no other has its address."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


_built: weakref.WeakKeyDictionary[HPCallWrapper, list[_Built]] = weakref.WeakKeyDictionary()


def cache_megatron_datasets() -> None:
    """Have Megatron's dataset builder return what it has built from equal arguments before the fault.

    It does so if every rank has it, since building is collective. Outside of a block nothing changes.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    if not _patches.are_made:
        _patches.make([Patch(BlendedMegatronDatasetBuilder, "build", _cached, _WHY)])


def _cached(original: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    @functools.wraps(original)
    def build(builder: Any) -> list[Any]:
        call = active_call_wrapper()
        if call is None:
            return original(builder)
        began_s, generation = time.monotonic(), call.generation
        arguments = _plain([builder.cls, builder.sizes, type(builder.config), vars(builder.config)])
        kept = [each for each in _built.get(call, []) if each.generation >= generation - 1]
        found = next((each for each in kept if each.arguments == arguments), None)
        if generation > 0:
            is_kept = true_on_all(found is not None)
            why = {} if is_kept else {"reason": "other arguments" if found is None and kept else "a new process"}
            emit_event(EventName.DATASETS, kept=is_kept, seconds=time.monotonic() - began_s, **why)
            if is_kept and found is not None:
                found.generation = generation
                return list(found.datasets)
        _built[call] = [each for each in kept if each is not found]
        del kept, found  # they need not stay in memory while others are built in their place
        datasets = original(builder)
        _built[call].append(_Built(arguments, list(datasets), generation))
        return datasets

    return build


def _plain(value: object) -> object:
    """Return a value that is equal to another one only if datasets that are built from both are the same."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    identifiers = getattr(value, "unique_identifiers", None)  # of a tokenizer; Megatron names index files by them
    if not isinstance(identifiers, Mapping):
        return _Same(value)
    held = getattr(value, "__dict__", {})
    own = {name: each for name, each in held.items() if isinstance(each, _PLAIN)}  # NeMo's name a class
    return [type(value), _plain(identifiers), own]
