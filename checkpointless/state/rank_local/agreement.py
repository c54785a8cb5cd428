"""In the first steps: whether all ranks agree on who holds the same, and whether it is the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from checkpointless.inprocess import UnrecoverableError
from checkpointless.state.port import TrainingState, split
from checkpointless.state.serialization.digest import MemoryChecksumManager, digest_each
from checkpointless.transfer.exchange import all_gather_json, wire_device
from checkpointless.transfer.rank_groups import Group, all_groups, compact, expanded, names
from checkpointless.transfer.tensor_entry import Key


def require_agreement(state: TrainingState, own: Collection[Key]) -> None:
    """Compare who holds what on all ranks, and whether they begin with the same. Collective.

    A tensor that is a rank's own (ranks were seeded differently, say) would be filled from another rank's after a
    fault.
    """
    parts = split(state, {key: tensor for key, tensor in state.tensors().items() if key not in own})
    known, digests = _told(parts, state.groups())
    try:
        all_groups(known)
    except ValueError as error:
        raise UnrecoverableError(str(error)) from error
    _require_the_same(
        parts,
        known,
        digests,
        "it begins with other values on rank {rank} than on rank {first}: give it the same values before training "
        "(seed the ranks alike, or broadcast it), or say which ranks hold the same (group=)",
    )


def require_equal_replicas(state: TrainingState, step: int) -> None:
    """Compare what the update of ``step`` left on ranks that hold all alike (not local SGD, say). Collective."""
    group = state.holders()
    parts = {group: split(state, state.shard()).get(group, {})}
    _require_the_same(
        parts,
        *_told(parts, parts),
        f"after step {step} it has other values on rank {{rank}} than on rank {{first}}, so that none could be "
        "filled from another: reduce gradients over these ranks before update(), or say which ranks hold the same "
        "(group=)",
    )


_Parts = Mapping[Group, Mapping[Key, torch.Tensor]]
_Digests = list[list[str | None]]  # of each rank's groups


def _told(parts: _Parts, groups: Iterable[Group]) -> tuple[Mapping[int, Sequence[Group]], _Digests]:
    """Tell all ranks this one's groups; return those of each rank, and the digests of their parts. Collective."""
    checksums = MemoryChecksumManager()
    digests = {group: checksums.digest_all(part) for group, part in parts.items()}
    told = all_gather_json([[compact(group), digests.get(group)] for group in groups])
    known = expanded([[group for group, _ in theirs] for theirs in told])
    return known, [[digest for _, digest in theirs] for theirs in told]


def require_same_step(done: int) -> None:
    """Raise ``UnrecoverableError`` if ranks begin after different numbers ``done`` of steps. Collective."""
    most = torch.tensor([done, -done], device=wire_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    newest, oldest = int(most[0]), -int(most[1])
    if newest != oldest:
        raise UnrecoverableError(
            f"some ranks begin behind step {oldest}, others behind step {newest}: load the same checkpoint on "
            "every rank, and give the same done= to steps()"
        )


def _require_the_same(parts: _Parts, known: Mapping[int, Sequence[Group]], digests: _Digests, reason: str) -> None:
    """Raise, for ``reason``, if holders of a group have sent different digests. Collective, if they have."""
    found: dict[Group, tuple[int, str | None]] = {}
    for rank, mine in enumerate(digests):
        for group, digest in zip(known[rank], mine, strict=True):
            first, theirs = found.setdefault(group, (rank, digest))
            if digest != theirs:
                name = _first_that_differs(parts.get(group, {}), first, rank)
                raise UnrecoverableError(
                    f"ranks {names(group)} are to hold the same {name}, and {reason.format(rank=rank, first=first)}"
                )


def _first_that_differs(part: Mapping[Key, torch.Tensor], one: int, other: int) -> str:
    """Return the name of the first tensor of a part that differs on two ranks. Collective."""
    mine = {".".join(map(str, key)): digest for key, digest in digest_each(part).items()}
    told = all_gather_json(mine)
    return next((name for name in told[one] if told[one][name] != told[other].get(name)), "tensors")
