"""Read chunks from storage by the strategy that is wrapped: one rank reads each. All ranks read together."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from checkpointless.megatron.dist_checkpoint.chunk import Chunk, Leaf, Strategy
from checkpointless.replication.agreement import attempt, by_rank, gather

_T = TypeVar("_T")
_ELSEWHERE = "it failed on another rank"


class StorageError(RuntimeError):
    """Chunks cannot be read from storage; the message says on which rank, and why."""


def read(wrapped: Strategy, checkpoint_dir: str | os.PathLike[str], leaves: Mapping[int, Leaf]) -> dict[int, Any]:
    """Read this rank's share, if the checkpoint has those of all: Megatron's loads wait for each other. Collective.

    Args:
        wrapped: the load strategy.
        checkpoint_dir: the checkpoint.
        leaves: by number, what this rank reads.

    Returns:
        The values: tensors, in the leaves' own if they have any, and objects.

    Raises:
        StorageError: on every rank, if something cannot be read on any rank.
    """
    asked = {str(number): copy.copy(leaf) for number, leaf in leaves.items()}
    _together(lambda: _look_up(wrapped, checkpoint_dir, leaves.values()), checkpoint_dir)
    values: dict[str, Any] | None = _together(lambda: wrapped.load(asked, Path(checkpoint_dir)), checkpoint_dir)
    return {int(number): value for number, value in (values or {}).items()}


def _together(do: Callable[[], _T], checkpoint_dir: str | os.PathLike[str]) -> _T | None:
    found, problem = attempt_megatrons(do)
    words = told_by(f"loading {checkpoint_dir}", problem)
    if words:
        raise StorageError(words) from problem
    return found


def _look_up(wrapped: Strategy, checkpoint_dir: str | os.PathLike[str], leaves: Collection[Leaf]) -> None:
    """Raise if a checkpoint lacks what this rank reads."""
    there = wrapped.load_sharded_metadata(Path(checkpoint_dir)) if leaves else {}
    for leaf in leaves:
        if (leaf.unique_key if isinstance(leaf, ShardedObject) else leaf.key) not in there:
            raise LookupError(
                f"{Chunk.of(leaf).words} is in no copy and not in the checkpoint: check that the model is the one "
                "that was saved, or load with a strictness that leaves out what is missing"
            )


def told_by(doing: str, problem: Exception | None) -> str:
    """Return one line about what went wrong on any rank; "" if nothing did. Collective.

    Args:
        doing: what the ranks were doing.
        problem: what went wrong on this rank.
    """
    told = gather("" if problem is None else line_of(problem))
    known = ["" if each == _ELSEWHERE else each for each in told]
    return by_rank(doing, known if any(known) else told) if any(told) else ""


def attempt_megatrons(do: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Return what a function of Megatron's returned, or what it raised, as ``attempt`` does.

    Torch's exception for what several ranks raised is none that ``except Exception`` catches.
    """

    def calmly() -> _T:
        try:
            return do()
        except CheckpointException as error:
            raise StorageError(line_of(error)) from error

    return attempt(calmly)


def line_of(error: BaseException) -> str:
    """Return one line about an error; of torch's, which holds those of several ranks, the first one."""
    if isinstance(error, CheckpointException):
        if not error.failures:
            return _ELSEWHERE  # only the rank that coordinates is told
        rank, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {line_of(first)}"
    text = " ".join(str(error).split())
    return text if type(error) in (LookupError, StorageError) else f"{type(error).__name__}: {text}"
