"""Have ranks make lists of calls of a player, and look at what came of each call."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.ranks.nemo_zygote import Zygote

Outcomes = list[list[dict[str, Any]]]


class Job:
    """Starts ranks afresh for each list of calls, with directories that stay: as ``play`` of a module does it."""

    def __init__(self, zygote: Zygote, root: Path, world: int, play: str, **settings: Any) -> None:
        self.zygote, self.root, self.world, self.play, self.settings = zygote, root, world, play, settings

    def run(self, *calls: Sequence[Any], world: int | None = None) -> Outcomes:
        arguments = {"root": str(self.root), "calls": calls, **self.settings}
        return self.zygote.run(world or self.world, self.play, arguments, env={"LOCAL_WORLD_SIZE": "2"})


def returned(outcomes: Outcomes, call: int) -> list[Any]:
    assert all("returned" in rank[call] for rank in outcomes), [rank[call] for rank in outcomes]
    return [rank[call]["returned"] for rank in outcomes]


def raised(outcomes: Outcomes, call: int, kind: str) -> list[str]:
    """Require that a call raised ``kind`` on every rank, and return the words of each."""
    assert {rank[call].get("raised") for rank in outcomes} == {kind}, [rank[call] for rank in outcomes]
    return [rank[call]["words"] for rank in outcomes]


def make_calls(player: object, calls: Sequence[Sequence[Any]], *errors: type[Exception]) -> list[dict[str, Any]]:
    """Make calls, with a barrier between two; return what each returned, or the type and words of an error."""
    outcomes: list[dict[str, Any]] = []
    for name, *arguments in calls:
        call: Callable[..., Any] = getattr(player, name)
        try:
            outcomes.append({"returned": call(*arguments)})
        except errors as error:
            outcomes.append({"raised": type(error).__name__, "words": str(error)})
        dist.barrier()
    return outcomes


def damage(paths: Iterable[Path]) -> None:
    """Flip a bit in the middle of each file."""
    for path in paths:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
