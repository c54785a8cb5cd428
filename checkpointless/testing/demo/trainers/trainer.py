"""What the demo knows of a trainer: what it is asked for, and the program that does it."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checkpointless.faults.chaos import Scope

#: Samples of a microbatch, and microbatches of a rank in each step.
MICRO_BATCH, MICRO_BATCHES = 2, 2
SEQUENCE = 64  # tokens of a sample
#: How to install what NeMo's trainers need.
NEMO_EXTRA = "pip install -e '.[nemo]' in a clone"


class DemoError(ValueError):
    """Raised if the demo cannot run as asked; the message is one line that says what to do."""


@dataclass(frozen=True)
class Task:
    """What a trainer is asked to train.

    Attributes:
        nproc: number of ranks.
        steps: number of optimizer steps.
        layout: parallel sizes by key of the trainer's ``keys``; a missing key means 1.
        dropout: dropout probability, in [0, 1).
        holders: number of ranks that hold each shard, where a trainer shards.
        workers: number of workers of each data loader.
        checksum: whether replicas are compared before a recovery.
        bucket_bytes: how many bytes the buffers of a transfer may take; None: as many as by default.
        checkpoint_every: optimizer steps between two checkpoints of the trainer's own (0: none).
        checkpoints: directory of these checkpoints.
    """

    nproc: int
    steps: int
    layout: Mapping[str, int] = field(default_factory=dict)
    dropout: float = 0.0
    holders: int = 2
    workers: int = 0
    checksum: bool = False
    bucket_bytes: int | None = None
    checkpoint_every: int = 0
    checkpoints: Path | None = None


@dataclass(frozen=True)
class Program:
    """A program that each rank runs.

    Attributes:
        module: name of the module.
        arguments: its arguments.
    """

    module: str
    arguments: tuple[str, ...]


class Trainer(ABC):
    """A way to train that the demo shows.

    Attributes:
        name: name on the command line.
        what: what is trained, and by whom, for people.
        corpus: what it is trained on.
        keys: parallel sizes that a layout may give.
        needs: modules that have to be installed.
        install: how to install them.
        scope: cases that chaos may draw.
    """

    name: str
    what: str
    corpus = "the English text of Python's own manual"
    keys: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("torch",)
    install: str = "pip install torch"
    scope: Scope

    def require(self) -> None:
        """Check that what the trainer needs is installed.

        Raises:
            DemoError: something is missing.
        """
        for name in self.needs:
            try:
                found = importlib.util.find_spec(name) is not None
            except ModuleNotFoundError:  # the package that it is in
                found = False
            if not found:
                raise DemoError(f"--trainer {self.name} needs {name}: {self.install}")

    @abstractmethod
    def check(self, nproc: int, layout: Mapping[str, int]) -> None:
        """Check that ``nproc`` ranks can be laid out as asked, each shard with two holders.

        Raises:
            DemoError: they cannot.
        """

    def prepare(self) -> None:  # noqa: B027 - most need nothing
        """Prepare this process for the import of the trainer's modules."""

    def notes(self, task: Task) -> Sequence[str]:
        """Return what people should know of ``task`` beside what they have asked for, a line each."""
        return ()

    @abstractmethod
    def program(self, task: Task) -> Program:
        """Return the program that does ``task``."""

    @abstractmethod
    def preload(self) -> Sequence[str]:
        """Return the names of modules that are worth importing once, before the ranks are forked."""


def divide(nproc: int, model_ranks: int, layout: Mapping[str, int], holders: int = 2) -> int:
    """Return how many data-parallel ranks there are.

    Args:
        nproc: number of ranks.
        model_ranks: number of ranks that share one model.
        layout: parallel sizes, for the message.
        holders: number that the data-parallel ranks have to be a multiple of.

    Raises:
        DemoError: the ranks do not divide so.
    """
    replicas, rest = divmod(nproc, model_ranks)
    shape = ",".join(f"{key}={size}" for key, size in layout.items()) or "one rank per model"
    use = f"use a multiple of {holders * model_ranks}"
    if rest:
        raise DemoError(f"--nproc {nproc} does not divide into models of {model_ranks} ranks ({shape}): {use}")
    if replicas % holders:
        raise DemoError(
            f"--nproc {nproc} makes {replicas} data-parallel ranks ({shape}), too few or too odd to hold every "
            f"shard twice: {use}"
        )
    return replicas
