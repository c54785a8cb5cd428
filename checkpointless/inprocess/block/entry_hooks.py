"""The hooks for all modules and optimizers, which a block that is entered again registers again.

Torch keeps them beside modules and optimizers (``register_module_forward_hook``, for example), so that they outlive
those of an entry. A block that registers one would have it once more after each fault in the processes that live
on, and once in a new one. What is registered once in a process, as by an import, stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers


class EntryHooks:
    """Hooks of this process as they were when this was made, and those of earlier entries of the block."""

    def __init__(self) -> None:
        self._before = [(registry, dict(registry)) for registry in _registries()]
        self._earlier: dict[int, Any] = {}  # hooks of earlier entries, by the number that torch gives each

    @classmethod
    def capture(cls) -> EntryHooks:
        """Capture the current hooks."""
        return cls()

    def restore(self) -> None:
        """Register again what the block has removed; what it has registered is looked at in :meth:`settle`."""
        self._earlier = {}
        for registry, before in self._before:
            others = {number: hook for number, hook in registry.items() if number not in before}
            registry.clear()
            registry.update({**before, **others})
            self._earlier.update({number: hook for number, hook in others.items() if callable(hook)})

    def settle(self) -> None:
        """Remove hooks of earlier entries that the block has registered again, now that it trains."""
        if not self._earlier:
            return
        known = {number for _, before in self._before for number in before}
        now = {number: hook for registry, _ in self._before for number, hook in registry.items() if callable(hook)}
        again = {_code(hook) for number, hook in now.items() if number not in known and number not in self._earlier}
        gone = [number for number, hook in self._earlier.items() if _code(hook) in again]
        for registry, _ in self._before:  # some hold only the numbers of those with a property
            for number in gone:
                registry.pop(number, None)
        self._earlier = {}


def _code(hook: Any) -> object:
    """Return what is the same if a line registers a hook again: its code, or the class of an object."""
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__code__", None) or type(hook)


def _registries() -> Iterator[dict[int, Any]]:
    for module in (modules, optimizers):
        for name, value in vars(module).items():
            if name.startswith("_global_") and isinstance(value, dict):
                yield value
