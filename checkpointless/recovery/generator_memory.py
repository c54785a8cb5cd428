"""Where random generators keep their state in memory, so that one comparison tells whether one has moved.

To ask a generator for its state costs more than a step may: Python's makes a tuple of 625 numbers, NumPy's a
dictionary, torch's a tensor. What is found here is memory to compare, not to decode: if it has not changed, neither
has the state. torch's is searched for in a generator that is made for that; where nothing is found, generators are
asked.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from typing import Any, TypeAlias

import torch

Memory: TypeAlias = "ctypes.Array[ctypes.c_char]"

MT19937_BYTES = 624 * 4 + 4  # of NumPy's mt19937_state: the words and the position; of Python's: the reverse
_BEFORE, _BEHIND = 24, 28  # of torch's words: seed and position; normal numbers that are pending
_SEARCHED_BYTES = 512  # how far into its generator torch's words may begin
_LEGACY_WORDS = slice(24, 24 + 624 * 8)  # in what torch's get_state() returns, each in 8 bytes


def python_memory(generator: object) -> Memory | None:
    """Return the memory of Python's generator: its position, then its words; None if it is another kind.

    CPython has them behind the head of the object (``RandomObject`` of ``_randommodule.c``). The second normal
    number that may be pending, ``gauss_next``, is elsewhere.
    """
    if type(generator) is not random.Random or sys.implementation.name != "cpython":
        return None
    return (ctypes.c_char * MT19937_BYTES).from_address(id(generator) + object.__basicsize__)


def numpy_memory(generator: object) -> Memory | None:
    """Return the memory of NumPy's bit generator: its words, then its position; None if it is another kind."""
    if type(generator).__name__ != "MT19937":
        return None
    numpys: Any = generator
    return (ctypes.c_char * MT19937_BYTES).from_address(int(numpys.ctypes.state_address))


def torch_memory(generator: torch.Generator) -> Memory | None:
    """Return the memory of one of torch's generators, which changes whenever its state does; None: it is not known.

    The generator has to live as long as the memory is looked at.
    """
    offset = _torch_offset()
    if offset is None or generator.device.type != "cpu":
        return None
    return _torch_memory_at(generator, offset)


@functools.cache
def _torch_offset() -> int | None:
    """Return where torch's words begin in a generator on the host; None if not all of its state is around there."""
    if sys.implementation.name != "cpython":
        return None
    generator = torch.Generator()
    generator.manual_seed(20_261_125)
    address = _implementation_of(generator)
    if address is None:
        return None
    words = _words_of(generator)
    around = ctypes.string_at(address, _SEARCHED_BYTES + len(words))
    offset = around.find(words)
    if offset < _BEFORE:
        return None
    memory = _torch_memory_at(generator, offset)
    return offset if memory is not None and _shows_each_draw(generator, memory) else None


def _shows_each_draw(generator: torch.Generator, memory: Memory) -> bool:
    """Return whether the memory changes with whatever changes its state; nobody else draws from the generator."""

    def draw_normal(dtype: torch.dtype) -> None:
        torch.empty((), dtype=dtype).normal_(generator=generator)  # every other one is pending from the one before

    changes = [
        *[lambda: torch.empty(1).uniform_(generator=generator)] * 700,  # new words are made on the way
        *[lambda: draw_normal(torch.float32)] * 4,
        *[lambda: draw_normal(torch.float64)] * 4,
        lambda: generator.manual_seed(5),
        lambda: generator.manual_seed(6),
    ]
    seen = {bytes(memory.raw)}
    for number, change in enumerate(changes, start=2):
        change()
        seen.add(bytes(memory.raw))
        if len(seen) != number:
            return False
    return True


def _torch_memory_at(generator: torch.Generator, offset: int) -> Memory | None:
    address = _implementation_of(generator)
    if address is None:
        return None
    memory = (ctypes.c_char * (_BEFORE + 624 * 4 + _BEHIND)).from_address(address + offset - _BEFORE)
    return memory if memory.raw[_BEFORE : _BEFORE + 624 * 4] == _words_of(generator) else None


def _implementation_of(generator: torch.Generator) -> int | None:
    """Return the address that Python's object holds; None if there is no writable memory as far as is looked at."""
    if type(generator) is not torch.Generator:
        return None
    address = ctypes.c_void_p.from_address(id(generator) + object.__basicsize__).value
    if address is None:
        return None
    end = address + _SEARCHED_BYTES + 624 * 4 + _BEHIND
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                span, rights, *_ = line.split()
                first, last = (int(each, 16) for each in span.split("-"))
                if first <= address < last:
                    return address if rights.startswith("rw") and end <= last else None
    except OSError:
        pass
    return None


def _words_of(generator: torch.Generator) -> bytes:
    """Return a generator's words as they are in memory."""
    state = generator.get_state().numpy().tobytes()[_LEGACY_WORDS]
    return b"".join(state[place : place + 4] for place in range(0, len(state), 8))
