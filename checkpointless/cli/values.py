"""Parsers of values on the command line, with messages for wrong ones."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

_FACTORS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LEAST_BYTES = 64 << 10


class UsageError(Exception):
    """Raised if what was asked for cannot be done; the message is one line that says what to do instead."""


def both(flag: str) -> tuple[str, ...]:
    """Return an option in torchrun's two spellings: with dashes, and with underscores."""
    return tuple(dict.fromkeys((flag, f"--{flag.removeprefix('--').replace('-', '_')}")))


def ranks(text: str) -> int:
    """Return the number of ranks of a node, as torchrun reads it: ``gpu``, ``cpu``, ``auto`` or a number."""

    cpus = len(os.sched_getaffinity(0))
    if text == "gpu":
        found = _count_cuda()
        if not found:
            raise argparse.ArgumentTypeError("this machine has no GPU that CUDA shows: give a number, or cpu")
        return found
    if text in ("cpu", "auto"):
        return (_count_cuda() if text == "auto" else 0) or cpus
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number of at least 1 nor gpu, cpu or auto")
    return positive(text)


def nodes(text: str) -> int:
    """Return the number of nodes; torchrun's ``MIN:MAX`` is one, too, if both are the same."""
    least, colon, most = text.partition(":")
    if not colon:
        return positive(text)
    if positive(least) != positive(most):
        raise argparse.ArgumentTypeError(
            f"{text}: the number of nodes is fixed here: --nnodes {most}, or --nnodes {least} with --spares for "
            "nodes that wait to replace a lost one"
        )
    return positive(most)


def local_ranks(text: str) -> tuple[int, ...]:
    return tuple(count(each.strip()) for each in text.split(","))


def positive(text: str) -> int:
    return _at_least(text, 1)


def count(text: str) -> int:
    return _at_least(text, 0)


def port(text: str) -> int:
    port = count(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return port


def _at_least(text: str, minimum: int) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
    return int(text)


def nbytes(text: str) -> int:
    number, factor = (text[:-1], _FACTORS[text[-1]]) if text[-1:] in _FACTORS else (text, 1)
    if not number.isascii() or not number.isdecimal() or len(number) > 12 or int(number) * factor < _LEAST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes of at least 64K, such as 1G")
    return int(number) * factor


def seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def modules(text: str) -> tuple[str, ...]:
    modules = tuple(module.strip() for module in text.split(","))
    if not all(part.isidentifier() for module in modules for part in module.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of modules with commas between them")
    return modules


# --- How many GPUs this machine has -------------------------------------------------------------------------------

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of WSL and of AMD


def _count_cuda() -> int:
    """Return the number of CUDA devices that a process sees; leaves CUDA as it is.

    It imports torch, which takes seconds, only where there is a driver.
    """
    if not any(Path(driver).exists() for driver in _DRIVERS):
        return 0
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about its own imports
        import torch
    return torch.cuda.device_count()  # asks NVML first, without initialising CUDA: ranks are forked from here


def has_cuda() -> bool:
    """Return whether there is a CUDA device."""
    return _count_cuda() > 0
