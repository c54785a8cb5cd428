"""The plain types of which messages consist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

#: An integer of at most 64 bits: nothing that is said is larger.
Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

#: What can be written as JSON.
Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None

#: What was read from JSON: plain values, lists and dicts, in a shape that only the reader knows.
Parsed: TypeAlias = Any
