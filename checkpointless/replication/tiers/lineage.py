"""Which steps the running training goes back to: a step that was made again after a fault is another step.

Where numerics are not deterministic, a step that is made twice may end in other bytes. So copies of a step are used
together only if they are of the same making, and only if the training that runs comes from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from checkpointless.replication.parts import SaveId

if TYPE_CHECKING:
    from checkpointless.launcher.protocol.plain import Json, Parsed

_MOST = 256  # generations; copies of earlier ones are too old to be of use
_JOB = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Lineage:
    """The generations that made the steps which the running training comes from.

    Attributes:
        job: names the job, in 16 hexadecimal digits.
        begun: the generations, and the step after which each began, both in ascending order. Those whose steps were
            all made again are left out.
    """

    job: str
    begun: tuple[tuple[int, int], ...] = ()

    def begin(self, generation: int, step: int) -> Lineage:
        """Return the lineage of a training that goes on in ``generation`` after ``step``."""
        kept = [(number, after) for number, after in self.begun if after < step and number <= generation]
        if kept and kept[-1][0] == generation:  # another fit of the same block
            return Lineage(self.job, tuple(kept))
        return Lineage(self.job, (*kept, (generation, step))[-_MOST:])

    def save(self, step: int) -> SaveId | None:
        """Return the name of the copies of ``step``; None if it was made before all that is known."""
        for generation, after in reversed(self.begun):
            if after < step:
                return SaveId(step, f"{self.job}{generation:08x}")
        return None

    def has(self, save: SaveId) -> bool:
        """Return whether the running training comes from the state that ``save`` is a copy of."""
        return self.save(save.iteration) == save

    @property
    def newest(self) -> int:
        """The newest generation that is known; -1: none is."""
        return self.begun[-1][0] if self.begun else -1

    def to_json(self) -> Json:
        """Return the lineage as plain data."""
        return [self.job, [list(each) for each in self.begun]]

    @classmethod
    def from_json(cls, plain: Parsed) -> Lineage:
        """Return what :meth:`to_json` made.

        Raises:
            ValueError: it did not make this.
        """
        try:
            job, begun = plain
            made = cls(str(job), tuple((int(generation), int(after)) for generation, after in begun))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a lineage: {plain!r}") from error
        if _JOB.fullmatch(made.job) is None:
            raise ValueError(f"not a lineage: {plain!r}")
        return made
