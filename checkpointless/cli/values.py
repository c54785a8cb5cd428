"""Parsers of values on the command line, with messages for wrong ones."""

from __future__ import annotations

import argparse


class UsageError(Exception):
    """Raised if what was asked for cannot be done; the message is one line that says what to do instead."""


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


def seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1.0 <= number < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1, such as 8e9")
    return number


def modules(text: str) -> tuple[str, ...]:
    modules = tuple(module.strip() for module in text.split(","))
    if not all(part.isidentifier() for module in modules for part in module.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of modules with commas between them")
    return modules
