"""How the ranks of a job agree: each sends all others what it knows, and an error on one is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import torch.distributed as dist

from checkpointless.transfer.exchange import all_gather_json

if TYPE_CHECKING:
    from checkpointless.launcher.protocol.causes import Json, Parsed

_T = TypeVar("_T")


class NoReplicasAvailableError(RuntimeError):
    """No rank that could send a part has an undamaged copy of it."""


class LocalCheckpointError(RuntimeError):
    """A local checkpoint could not be saved or loaded; the message says on which rank, and why."""


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(message: Json) -> list[Parsed]:
    """Return every rank's message, plain JSON data, in rank order. Collective."""
    return all_gather_json(message) if dist.is_initialized() else [message]


def together(doing: str, do: Callable[[], _T]) -> _T:
    """Return what ``do`` returned; raise on every rank what it raised on some rank. Collective."""
    returned, problem = attempt(do)
    lost = isinstance(problem, NoReplicasAvailableError)
    told = gather(None if problem is None else [lost, words(problem)])
    if any(told):
        kind = NoReplicasAvailableError if any(each[0] for each in told if each) else LocalCheckpointError
        raise kind(by_rank(doing, [each[1] if each else "" for each in told])) from problem
    return cast("_T", returned)


def attempt(do: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Return what ``do`` returned, or what it raised: waiting ranks must hear of it before it can be raised."""
    try:
        return do(), None
    except Exception as error:  # noqa: BLE001 - every caller tells the other ranks, or warns
        return None, error


def words(error: Exception | None) -> str:
    """Return the text of ``error`` for the other ranks; "" if there is none."""
    return "" if error is None else f"{error}" or type(error).__name__


def by_rank(doing: str, words: Sequence[str]) -> str:
    """Return a message with what each rank says."""
    return f"{doing}: " + "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(words) if each)
