"""The plain types of which messages consist."""

from __future__ import annotations

from typing import Annotated

import msgspec

#: An integer of at most 64 bits: nothing that is said is larger.
Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
