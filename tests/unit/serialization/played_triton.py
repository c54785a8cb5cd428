"""Play the part of Triton that the digest's kernel uses, with numpy: its source runs where there is no Triton."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

KERNEL = "checkpointless.state.serialization.digest_kernel"


class Block(np.ndarray):
    """Represents a tensor of the kernel, with at least one dimension, since numpy turns scalars into floats."""

    def to(self, dtype: type, bitcast: bool = False) -> Block:
        """Convert, or with ``bitcast`` only read the same bits as another type."""
        return np.asarray(self.view(dtype) if bitcast else self.astype(dtype)).view(Block)


class Pointer:
    """Represents addresses in the memory of a tensor, which must not be used beyond its ends.

    Args:
        memory: the tensor's elements.
        places: which of them.
    """

    def __init__(self, memory: np.ndarray, places: Any = 0) -> None:
        self.memory, self.places = memory, places

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.places + other)


class Kernel:
    """Represents a function that was compiled.

    Args:
        function: what it does.
        language: the module that stands for ``triton.language``.
    """

    def __init__(self, function: Callable[..., Any], language: Any) -> None:
        self._function, self._language = function, language

    def __call__(self, *given: Any) -> Any:
        return self._function(*given)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def run(*given: Any, **named: Any) -> None:
            args = [
                _pointer(each) if isinstance(each, torch.Tensor) else _block([each], np.int64) for each in given
            ]
            for program in reversed(range(grid[0])):  # the order must not matter
                self._language.program = program
                self._function(*args, **named)

        return run


def played_kernel() -> Any:
    """Return the kernel, made by a Triton that is played."""
    language: Any = types.ModuleType("triton.language")
    triton: Any = types.ModuleType("triton")
    triton.language = language

    def jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
        return jit if function is None else Kernel(function, language)

    triton.jit = jit
    language.constexpr = lambda value: value
    language.tensor, language.int64, language.uint64 = Block, np.int64, np.uint64
    language.program_id = lambda axis: _block([language.program], np.int64)
    language.arange = lambda begin, end: _block(range(begin, end), np.int64)
    language.zeros = lambda shape, dtype: _block(np.zeros(shape), dtype)
    language.static_range = range
    language.sum = lambda block, axis: block.sum(axis=axis, keepdims=True)
    language.where = lambda mask, one, other: np.where(mask, one, one.dtype.type(other)).view(Block)
    language.load, language.atomic_add = load, _atomic_add
    names = {"triton": triton, "triton.language": language}
    before = {name: sys.modules.pop(name, None) for name in (*names, KERNEL)}
    sys.modules.update(names)
    try:
        return importlib.import_module(KERNEL).add_digest
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def _pointer(tensor: torch.Tensor) -> Pointer:
    return Pointer(tensor.numpy().reshape(-1))


def _block(values: Any, dtype: Any) -> Block:
    return np.asarray(list(values), dtype=dtype).view(Block)


def load(pointer: Pointer, mask: np.ndarray, other: int) -> Block:
    """Load what the mask selects; else ``other``."""
    found = np.full(pointer.places.shape, other, dtype=pointer.memory.dtype)
    found[mask] = pointer.memory[pointer.places[mask]]
    return found.view(Block)


def _atomic_add(pointer: Pointer, value: Block, sem: str) -> None:
    pointer.memory[pointer.places : pointer.places + 1] += value
