"""Makes copies of this rank's state in all tiers while training goes on, and knows which there are."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

import torch.distributed as dist

from checkpointless.inprocess import UnrecoverableError
from checkpointless.inprocess.communicators.helper_thread import awaiting
from checkpointless.inprocess.facts import Facts
from checkpointless.local_checkpoint.agreement import attempt, by_rank, gather, words
from checkpointless.local_checkpoint.memory_storage import MemoryStorage
from checkpointless.local_checkpoint.part_id import SaveId
from checkpointless.local_checkpoint.part_storage import PartStorage
from checkpointless.local_checkpoint.replication import timeout_of_the_job
from checkpointless.recovery.tiers.clique_exchange import CliqueExchange
from checkpointless.recovery.tiers.copying import Clique, Copying
from checkpointless.recovery.tiers.lane import within
from checkpointless.recovery.tiers.lineage import Lineage
from checkpointless.recovery.tiers.neighborhoods import neighborhoods
from checkpointless.recovery.tiers.snapshot import Snapshot
from checkpointless.recovery.tiers.tier import Tier
from checkpointless.recovery.tiers.unusable_storage import UnusableStorage

if TYPE_CHECKING:
    from checkpointless.wire.plain import Json

logger = logging.getLogger(__name__)

_TURN_S = 0.02
_COPYING_S = 60.0  # host memory takes seconds for a hundred gigabytes
ANSWER_S = 30.0  # a directory that does not answer for so long is taken for gone
_FACT = "lineage"


class Copies:
    """Makes copies of this rank's state, and keeps its neighbors'. All ranks call each method together.

    While training goes on, the state is copied to host memory in a thread, goes to the neighbors from there, and is
    written to directories in another one. Training waits for the first of these before its next update, for the
    second before copies are due again, and for the third never: if a directory is too slow, a save is left out.

    Args:
        tiers: where copies are kept.

    Raises:
        ValueError: two tiers have the same name.

    Attributes:
        tiers: the tiers, the cheapest first.
        lineage: what the running training comes from; None: nothing has begun.
    """

    def __init__(self, tiers: Sequence[Tier] = ()) -> None:
        names = [tier.name for tier in tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"each tier can be given once, and not {', '.join(names)}")
        self.tiers = sorted(tiers, key=lambda tier: tier.cost)
        self.lineage: Lineage | None = None
        self._storages: dict[str, PartStorage] = {}
        self._exchanges: dict[Clique, CliqueExchange] = {}
        self._generation = -1  # in which the exchanges were made
        self._copying: Copying | None = None  # None: nothing is copied now
        self._last: Copying | None = None  # the newest there was
        self._left: list[Copying] = []  # whose threads may still be at their last tasks

    def __bool__(self) -> bool:
        return bool(self.tiers)

    # --- at the begin of a generation -----------------------------------------------------------------------------

    def begin(self, generation: int, step: int, facts: Facts | None, group: Sequence[int]) -> None:
        """Begin to make copies, in a generation whose training begins after ``step``. Collective.

        Args:
            generation: the generation.
            step: the optimizer step.
            facts: what outlives this process; None: nothing does.
            group: the ranks that hold the same shard as this one.

        Raises:
            UnrecoverableError: in the first generation, a tier cannot be used on some rank; or the ranks have
                different tiers, or too few ranks for them.
        """
        if generation == self._generation:
            self._settle_all()  # an earlier fit of this block, which left its loop
        self.leave()
        self.lineage = self.agree(facts).begin(generation, step)
        if facts is not None:
            facts.keep(_FACT, self.lineage.to_json())
        self.open(required=generation == 0)
        jumps = neighborhoods(self.tiers, group)
        cliques = {tier.name: (jumps[tier.name], tier.copies) for tier in self.tiers if tier.copies}
        if generation != self._generation:
            self._exchanges, self._generation = {}, generation
        for jump, copies in dict.fromkeys(cliques.values()):
            if (jump, copies) not in self._exchanges:
                self._exchanges[jump, copies] = CliqueExchange(jump, copies + 1, timeout_of_the_job())
        for name, storage in self._storages.items():
            if isinstance(storage, MemoryStorage):  # a thread of the generation before may still use the old one
                self._storages[name] = storage.copy()
        self._copying = self._last = Copying(
            self.tiers, self._storages, cliques, self._exchanges, self.lineage, self._last
        )

    def agree(self, facts: Facts | None) -> Lineage:
        """Learn from the other ranks what the training comes from, and require the same tiers. Collective.

        Returns:
            The lineage that some rank knows, or a new one if the job has none yet.

        Raises:
            UnrecoverableError: the ranks have different tiers.
        """
        known = self.lineage
        if known is None and facts is not None and facts.get(_FACT) is not None:
            known = Lineage.from_json(facts.get(_FACT))
        mine: list[Json] = [[tier.name, tier.every, tier.copies, tier.jump] for tier in self.tiers]
        told = gather([mine, None if known is None else known.to_json(), secrets.token_hex(8)])
        if any(each[0] != told[0][0] for each in told):
            raise UnrecoverableError(
                by_rank(
                    "the ranks were given different tiers", [str([tier[0] for tier in each[0]]) for each in told]
                )
            )
        lineages = [Lineage.from_json(each[1]) for each in told if each[1] is not None]
        self.lineage = max(lineages, key=lambda each: each.newest) if lineages else Lineage(told[0][2])
        return self.lineage

    def open(self, required: bool = False) -> None:
        """Open the storages of all tiers, unless that was done. Collective.

        Args:
            required: whether every tier has to be there. Else one that is not costs its copies, with a warning.

        Raises:
            UnrecoverableError: a place that is required cannot be used on some rank.
        """
        assert self.lineage is not None
        problems = []
        for tier in self.tiers:
            if tier.name in self._storages:
                continue
            storage, problem = attempt(
                partial(within, ANSWER_S, partial(tier.open, self.lineage.job, dist.get_rank()))
            )
            if storage is None:
                problems.append(f"{tier.name}: {words(problem)}")
                storage = UnusableStorage(words(problem))
            self._storages[tier.name] = storage
        told = [str(each) for each in gather("; ".join(problems))]
        if any(told) and required:
            raise UnrecoverableError(by_rank("copies of the state cannot be kept", told))
        for each in problems:
            logger.warning("no copies are kept here until this process ends: %s", each)

    def storage(self, tier: str) -> PartStorage:
        """Return the storage of the tier of that name, which is open."""
        return self._storages[tier]

    @property
    def nbytes(self) -> tuple[int, int]:
        """How many bytes a copy of this rank's state takes, and how many all take that are in its memory."""
        kept = [*self._last.kept.values()] if self._last is not None else []
        mine = (parts[dist.get_rank()].nbytes for parts in kept if dist.get_rank() in parts)
        return next(mine, 0), sum(part.nbytes for parts in kept for part in parts.values())

    # --- while training -------------------------------------------------------------------------------------------

    def make(self, step: int, take: Callable[[], Snapshot | None]) -> None:
        """Begin to make copies of the state after ``step`` in the tiers in which they are due. Collective.

        Args:
            step: the optimizer step that has just been committed.
            take: returns the state, whose tensors are the live ones; None if this rank has none to copy.

        Raises:
            Exception: what has ended the copying.
        """
        copying, lineage = self._copying, self.lineage
        if copying is None or lineage is None:
            return
        # What this generation went on from may still be being written to directories by the one before.
        again = step == lineage.begun[-1][1]
        due = [tier for tier in self.tiers if tier.is_due(step) and (tier.is_memory or not again)]
        due = self._without_busy(copying, due) if any(not tier.is_memory for tier in due) else due
        save = lineage.save(step)
        if not due or save is None:
            return
        making = copying.begin(save, take(), due)
        if any(tier.waits for tier in due):
            self._wait(copying, making.arrived)

    def settle(self, step: int) -> None:
        """Wait until the update of ``step`` may change the state, and what is due after it may be begun.

        Raises:
            Exception: what has ended the copying.
        """
        copying = self._copying
        making = copying.making if copying is not None else None
        if copying is None or making is None:
            return
        self._wait(copying, making.copied)
        if any(tier.is_due(step) for tier in self.tiers):
            self._wait(copying, making.arrived)

    def finish(self) -> None:
        """Wait until the copies that are being made are where they belong, and make no more."""
        copying = self._copying
        if copying is not None and copying.making is not None:
            self._wait(copying, copying.making.arrived)
        self.leave()

    def end(self) -> None:
        """Remove all copies, since nothing will be recovered from them any more."""
        deadline_s = time.monotonic() + _COPYING_S
        self._settle_all()
        self.leave()
        while not all(each.has_ended for each in self._left) and time.monotonic() < deadline_s:
            time.sleep(_TURN_S)
        for tier in self.tiers:
            if tier.name in self._storages:
                _, problem = attempt(partial(within, ANSWER_S, partial(tier.clear, self._storages[tier.name])))
                if problem is not None:
                    logger.warning("%s: copies may be left: %s", tier.name, words(problem))
        self._storages, self._exchanges, self._last = {}, {}, None

    def leave(self) -> None:
        """Stop making copies, because a fault has ended the generation. What is complete stays."""
        copying = self._copying
        if copying is None:
            return
        copying.leave()
        making, deadline_s = copying.making, time.monotonic() + _COPYING_S
        while making is not None and making.begun and not making.copied.wait(_TURN_S):
            if time.monotonic() > deadline_s:
                logger.error("the state was not copied to host memory within %g s: that copy is void", _COPYING_S)
                making.void = True
                break
        self._left = [each for each in [*self._left, copying] if not each.has_ended]
        self._copying = None

    def _settle_all(self) -> None:
        """Wait, for a minute at most, until neighbors have what they wait for, since there was no fault."""
        copying, deadline_s = self._copying, time.monotonic() + _COPYING_S
        if copying is None or copying.making is None:
            return
        with awaiting(copying.thread):
            while not copying.making.arrived.wait(_TURN_S) and not copying.is_idle:
                if time.monotonic() > deadline_s:
                    logger.warning("copies of the state did not arrive within %g s", _COPYING_S)
                    return

    def _wait(self, copying: Copying, event: Event) -> None:
        """Wait interruptibly for an event of what is being made.

        Raises:
            Exception: what has ended the copying: a neighbor is gone, for example, whose fault will be known soon.
        """
        if not event.is_set():
            with awaiting(copying.thread):
                while not event.wait(_TURN_S) and not copying.is_idle:
                    pass
        if copying.error is not None:
            raise copying.error

    def _without_busy(self, copying: Copying, due: Sequence[Tier]) -> list[Tier]:
        """Learn what became of the last saves in directories, and leave out those that are busy. Collective."""
        stuck = {name for each in self._left for name in each.unfinished}
        known = {tier.name: copying.directories[tier.name] for tier in due if not tier.is_memory}
        told = gather(
            [
                [
                    "busy" if name in stuck else each.outcome,
                    str(each.last),
                    sorted(map(str, each.present)) if each.whole is None else [],
                ]
                for name, each in known.items()
            ]
        )
        left_out = set()
        for place, (name, directory) in enumerate(known.items()):
            outcomes = {each[place][0] for each in told}
            everywhere = set.intersection(*({*each[place][2]} for each in told))
            if directory.whole is None and everywhere:
                directory.whole = max(map(SaveId.parse, everywhere))
            if all(each[place][:2] == ["whole", str(directory.last)] for each in told):
                directory.whole = directory.last
            if "busy" in outcomes:
                left_out.add(name)
                if not directory.has_told and dist.get_rank() == 0:
                    logger.warning("%s: the last copy is still being written; this one is left out", name)
                directory.has_told = True
        return [tier for tier in due if tier.name not in left_out]
