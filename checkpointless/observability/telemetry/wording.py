"""Formatting of numbers and foreign text for people."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection

UNKNOWN = "unknown"
INCIDENT = "incident "  # beginning of an incident's first and last line
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def printable(text: str, limit: int | None = None) -> str:
    """Return ``text`` as one line of at most ``limit`` printable characters, for a terminal or a page.

    Characters that move the cursor, change colours or the direction of writing, or have no encoding, become codes.
    """
    if limit is not None:
        text = text[: 8 * limit]  # the rest is not looked at
    line = " ".join(text.split())
    shown = "".join(_code(each) if unicodedata.category(each) in _UNPRINTABLE else each for each in line)
    return shown if limit is None or len(shown) <= limit else f"{shown[: limit - 1]}…"


def duration(seconds: float | None) -> str:
    """Format seconds with about three digits: ``1.27 s``, ``35 min 12 s``, ``3 d 4 h``."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0.0005:
        return "0 s" if seconds <= 0 else "<1 ms"
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.{2 if seconds < 10 else 1}f} s"
    whole = round(seconds)
    if whole < 3600:
        return _two(whole, 60, "min", "s")
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return _two(minutes, 60, "h", "min")
    return _two(round(seconds / 3600), 24, "d", "h")


def size(nbytes: int) -> str:
    """Format bytes in decimal units with three digits: ``1.63 MB``."""
    value, power = float(nbytes), 0
    while value >= 999.5 and power + 1 < len(_UNITS):
        value, power = value / 1000, power + 1
    return f"{value:.0f} {_UNITS[power]}" if power == 0 or value >= 100 else f"{value:.3g} {_UNITS[power]}"


def plural(count: int, noun: str) -> str:
    """Format a count and its noun: ``1 incident``, ``2 incidents``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def numbered(noun: str, numbers: Collection[int], shown: int = 8) -> str:
    """Name numbered things, such as ``ranks 0-2, 5``; only the first ``shown`` runs of numbers are named."""
    if not numbers:
        return f"no {noun}"
    runs: list[list[int]] = []
    for each in sorted(set(numbers)):
        if runs and each == runs[-1][1] + 1:
            runs[-1][1] = each
        else:
            runs.append([each, each])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    more = f" and {len(words) - shown} more" if len(words) > shown else ""
    return f"{noun}{'' if len(set(numbers)) == 1 else 's'} {', '.join(words[:shown])}{more}"


def _two(count: int, per: int, larger: str, smaller: str) -> str:
    rest = f" {count % per} {smaller}" if count % per else ""
    return f"{count // per} {larger}{rest}" if count >= per else rest.strip()


def _code(character: str) -> str:
    point = ord(character)
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
