"""The configuration of a demo, and the checks that it can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from checkpointless.testing.demo.trainers import TRAINERS, DemoError, Task, Trainer

MOST_RANKS = 32  # more ranks than that, on one machine's CPUs, spend their time waiting for each other


@dataclass(frozen=True)
class DemoConfig:
    """Configuration of one demo.

    Attributes:
        nproc: number of ranks, on this machine's CPUs.
        steps: number of optimizer steps of each of the two runs.
        layout: parallel sizes by key of the trainer; a missing key means 1.
        dropout: dropout probability, in [0, 1).
        faults: fault specs of the second run.
        run_dir: directory in which both runs are kept; None: a new directory under ``runs/``.
        trainer: what trains.

    Raises:
        DemoError: the ranks cannot be laid out so that each shard is held twice, the model cannot be divided as
            asked, a number is out of range, or what the trainer needs is not installed.
    """

    nproc: int = 4
    steps: int = 10
    layout: Mapping[str, int] = field(default_factory=dict)
    dropout: float = 0.0
    faults: tuple[str, ...] = ()
    run_dir: Path | None = None
    trainer: Trainer = TRAINERS["nemo"]

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise DemoError(f"--steps must be at least 1, not {self.steps}")
        if not 0.0 <= self.dropout < 1.0:
            raise DemoError(f"--dropout must be at least 0 and below 1, not {self.dropout:g}")
        if not 1 <= self.nproc <= MOST_RANKS:
            raise DemoError(f"--nproc must be from 2 to {MOST_RANKS}, not {self.nproc}")
        self.trainer.check(self.nproc, self.layout)

    @property
    def task(self) -> Task:
        """What the trainer is asked to train."""
        return Task(self.nproc, self.steps, self.layout, self.dropout)


def parse_layout(text: str, keys: tuple[str, ...]) -> dict[str, int]:
    """Parse a layout such as ``tp=2,pp=1``.

    Args:
        text: ``key=size`` pairs with commas between them; empty for none.
        keys: the keys that there are.

    Raises:
        DemoError: a key is unknown or occurs twice, or a size is not a whole number of at least 1.
    """
    layout: dict[str, int] = {}
    for part in text.split(",") if text.strip() else ():
        key, _, size = (piece.strip() for piece in part.partition("="))
        if key not in keys:
            known = f"is not one of {', '.join(f'{k}=N' for k in keys)}" if keys else "is not for this trainer"
            raise DemoError(f"layout {text!r}: {part!r} {known}")
        if key in layout:
            raise DemoError(f"layout {text!r}: {key} is there twice")
        if not size.isascii() or not size.isdecimal() or not 1 <= int(size) <= 10**6:
            raise DemoError(f"layout {text!r}: {key} must be a whole number of at least 1, not {size!r}")
        layout[key] = int(size)
    return layout
