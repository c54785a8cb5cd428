"""The hooks for all modules and optimizers at the entry of the block, which are the same at every entry.

Torch keeps them beside modules and optimizers (``register_module_forward_hook``, for example), so that they outlive
those of an entry. A block that registers one would have it once more after each fault in the processes that live
on, and once in a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers


@dataclass(frozen=True)
class EntryHooks:
    """Hooks of this process at one moment.

    Attributes:
        registries: torch's registries, each with what is in it.
        is_full: whether the backward hooks for all modules are full ones; None: there were none.
    """

    registries: tuple[tuple[dict[int, Any], dict[int, Any]], ...]
    is_full: bool | None

    @classmethod
    def capture(cls) -> EntryHooks:
        """Capture the current hooks."""
        is_full = modules._global_is_full_backward_hook
        return cls(tuple((each, dict(each)) for each in _registries()), is_full)

    def restore(self) -> None:
        """Restore the captured hooks."""
        for registry, hooks in self.registries:
            registry.clear()
            registry.update(hooks)
        modules._global_is_full_backward_hook = self.is_full


def _registries() -> Iterator[dict[int, Any]]:
    for module in (modules, optimizers):
        for name, value in vars(module).items():
            if name.startswith("_global_") and isinstance(value, dict):
                yield value
