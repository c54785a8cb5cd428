"""A LightningModule as its script gave it to the trainer, which NeMo builds in and binds functions to.

A module that was made outside of the block is the same object at each entry. NeMo leaves in it the model that it
built, over process groups that no longer exist, and functions bound to the old strategy. What was added since the
module was given is taken out when the generation ends, so that NeMo builds in it again.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from checkpointless.inprocess.finalize import register_cleanup

_TABLES = ("_parameters", "_buffers", "_modules")
_TRAINER = ("_trainer", "_fabric")  # of the generation that is over


class GivenModule:
    """Notes what a module consists of, without keeping the module.

    Args:
        module: the module, which no strategy has set up yet.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self._attributes = {name: value for name, value in vars(module).items() if name not in _TRAINER}
        self._tables = {name: dict(vars(module)[name]) for name in _TABLES}

    def put_back(self) -> None:
        """Give the module the attributes, parameters and modules that it had, and no others."""
        module = self._module()
        if module is None:
            return
        attributes = vars(module)
        unbound: dict[str, Any] = {name: None for name in _TRAINER if name in attributes}
        tables = {name: attributes[name] for name in _TABLES}
        attributes.clear()
        attributes.update(self._attributes, **unbound, **tables)
        for name, table in tables.items():
            table.clear()
            table.update(self._tables[name])


def note(module: torch.nn.Module) -> None:
    """Note a module, which is put back when the generation ends."""
    register_cleanup("given module", GivenModule(module).put_back)
