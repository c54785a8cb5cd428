"""A LightningModule as its script gave it to the trainer, before NeMo builds in it and binds functions to it.

A module that was made outside of the block is the same object at each entry. NeMo leaves in it the model that it
built, over process groups that no longer exist, and functions bound to the old strategy. What was added is taken
out when the generation ends, so that NeMo can set up again.
"""

from __future__ import annotations

import weakref
from typing import Any

import lightning.pytorch as pl

from checkpointless.inprocess.finalize import register_cleanup

_TABLES = ("_parameters", "_buffers", "_modules")
_TRAINER = ("_trainer", "_fabric")  # of the generation that is over


class GivenModule:
    """Notes what a module consists of.

    Args:
        module: the module, which no strategy has set up yet.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        attributes = vars(module)
        self._module = weakref.ref(module)
        self._attributes = {name: value for name, value in attributes.items() if name not in _TRAINER}
        self._tables = {name: dict(attributes[name]) for name in _TABLES}

    def is_of(self, module: pl.LightningModule) -> bool:
        """Return whether this is what was noted of ``module``."""
        return self._module() is module

    def put_back(self) -> None:
        """Take out what was added since, and let go of everything."""
        module = self._module()
        if module is not None and self._tables:
            attributes = vars(module)
            unbound: dict[str, Any] = {name: None for name in _TRAINER if name in attributes}
            tables = {name: attributes[name] for name in _TABLES}
            attributes.clear()
            attributes.update(self._attributes, **unbound, **tables)
            for name, table in tables.items():
                table.clear()
                table.update(self._tables[name])
        self._attributes, self._tables = {}, {}


_given: dict[int, GivenModule] = {}  # of this generation, by the identity of the module


def note(module: pl.LightningModule) -> None:
    """Note a module before its first fit of a generation. It is put back when the generation ends."""
    known = _given.get(id(module))
    if known is None or not known.is_of(module):
        _given[id(module)] = GivenModule(module)
    register_cleanup("given modules", _put_back)


def _put_back() -> None:
    while _given:
        _given.popitem()[1].put_back()
