"""The names of saves and of the ranks' parts of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SAVE = r"iter_(?P<iteration>\d{10,})\.(?P<token>[0-9a-f]{24})"
#: Matches the name of a part, with the groups ``iteration``, ``token`` and ``part``.
PART = _SAVE + r"\.part_(?P<part>\d+)"


@dataclass(frozen=True, order=True)
class SaveId:
    """Names one save of all ranks. A later save is greater.

    Attributes:
        iteration: the iteration that was saved, at least 0.
        token: 24 hexadecimal digits that all ranks share and no other save has; they order two saves of one
            iteration.
    """

    iteration: int
    token: str

    def __str__(self) -> str:
        return f"iter_{self.iteration:010d}.{self.token}"

    @classmethod
    def parse(cls, text: str) -> SaveId:
        """Parse what ``str`` made.

        Raises:
            ValueError: ``text`` names no save.
        """
        found = re.fullmatch(_SAVE, text)
        if found is None:
            raise ValueError(f"{text!r} names no save")
        return cls(int(found["iteration"]), found["token"])


@dataclass(frozen=True, order=True)
class PartId:
    """One rank's part of a save. Its ``str`` is its name everywhere.

    Attributes:
        save: the save.
        part: the rank whose state it is.
    """

    save: SaveId
    part: int

    def __str__(self) -> str:
        return f"{self.save}.part_{self.part}"

    @property
    def words(self) -> str:
        """The part in words, for messages."""
        return f"part {self.part} of iteration {self.save.iteration}"

    @classmethod
    def parse(cls, text: str) -> PartId:
        """Parse what ``str`` made.

        Raises:
            ValueError: ``text`` does not name a part.
        """
        found = re.fullmatch(PART, text)
        if found is None:
            raise ValueError(f"{text!r} names no part of a local checkpoint")
        return cls(SaveId(int(found["iteration"]), found["token"]), int(found["part"]))
