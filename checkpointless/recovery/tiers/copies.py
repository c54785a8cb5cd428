"""Makes copies of this rank's state in all tiers while training goes on, and knows which there are."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from checkpointless.inprocess import UnrecoverableError
from checkpointless.inprocess.communicators.helper_thread import awaiting
from checkpointless.inprocess.facts import Facts
from checkpointless.local_checkpoint.agreement import attempt, by_rank, gather, words
from checkpointless.local_checkpoint.cliques import clique_of
from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.part_id import PartId, SaveId
from checkpointless.local_checkpoint.part_storage import PartStorage
from checkpointless.local_checkpoint.replication import timeout_of_the_job
from checkpointless.recovery.tiers.clique_exchange import CliqueExchange
from checkpointless.recovery.tiers.host_part import HostMemoryPool, HostPart, copy_into, laid_out
from checkpointless.recovery.tiers.lane import Lane
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
_FACT = "lineage"
_Parts = Sequence[tuple[PartId, Content]]


@dataclass
class _Making:
    """Copies that are being made.

    Attributes:
        save: their name.
        begun: whether the state is being copied to the host.
        void: whether training may have changed the state before it was copied.
        copied: set when that is over: training may change the state.
        arrived: set when the neighbors' parts are here, and this rank's part is there.
    """

    save: SaveId
    begun: bool = False
    void: bool = False
    copied: threading.Event = field(default_factory=threading.Event)
    arrived: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Directory:
    """What this rank knows of a tier that is no memory.

    Attributes:
        last: the save that was begun last in this generation; None: none was.
        outcome: what became of it: "busy", "whole" (this rank's parts are there) or "failed".
        whole: the newest save of this generation that all ranks have; None: there is none.
        has_told: whether it was said that the tier is too slow.
    """

    last: SaveId | None = None
    outcome: str = "failed"
    whole: SaveId | None = None
    has_told: bool = False


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
        self._directories = {tier.name: _Directory() for tier in self.tiers if not tier.is_memory}
        self._pool = HostMemoryPool()
        self._kept: Mapping[SaveId, Sequence[HostPart]] = {}  # what lies in memory of the pool
        self._writing: dict[str, SaveId] = {}  # by tier, the save that is being written to its directory
        self._lanes: list[Lane] = []  # the first copies, the second writes to directories
        self._left_lanes: list[Lane] = []  # that may still be at their last task
        self._jumps: Mapping[str, int] = {}
        self._exchanges: dict[tuple[int, int], CliqueExchange] = {}
        self._making: _Making | None = None

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
        self.leave()  # an earlier fit of this block
        self.lineage = self.agree(facts).begin(generation, step)
        if facts is not None:
            facts.keep(_FACT, self.lineage.to_json())
        self.open(required=generation == 0)
        self._jumps = neighborhoods(self.tiers, group)
        self._exchanges = {}
        for tier in self.tiers:
            clique = self._clique(tier)
            if tier.copies and clique not in self._exchanges:
                members = clique_of(dist.get_rank(), dist.get_world_size(), clique[0], clique[1] + 1)
                self._exchanges[clique] = CliqueExchange(members, timeout_of_the_job())
        self._lanes = [Lane("copying the state"), Lane("writing copies of the state")]
        # A process that is new does not know what the others wrote.
        self._directories = {name: _Directory() for name in self._directories}

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
            storage, problem = attempt(partial(tier.open, self.lineage.job, dist.get_rank()))
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

    def _clique(self, tier: Tier) -> tuple[int, int]:
        """Return how far apart the ranks are that keep a tier's copies, and how many other ranks keep each."""
        return self._jumps[tier.name], tier.copies

    # --- while training -------------------------------------------------------------------------------------------

    def make(self, step: int, take: Callable[[], Snapshot | None]) -> None:
        """Begin to make copies of the state after ``step`` in the tiers in which they are due. Collective.

        Args:
            step: the optimizer step that has just been committed.
            take: returns the state, whose tensors are the live ones; None if this rank has none to copy.
        """
        lanes = self._lanes
        if self.lineage is None or not lanes:
            return
        due = [tier for tier in self.tiers if tier.is_due(step)]
        due = self._without_busy(due) if any(not tier.is_memory for tier in due) else due
        save = self.lineage.save(step)
        if not due or save is None or lanes[0].has_failed:
            return
        for tier in due:
            if not tier.is_memory:
                self._directories[tier.name].last, self._directories[tier.name].outcome = save, "busy"
        making = self._making = _Making(save)
        lanes[0].do(partial(self._copy, making, take(), due, _recorded(), lanes))
        if any(tier.waits for tier in due):
            self._wait(making.arrived)

    def settle(self, step: int) -> None:
        """Wait until the update of ``step`` may change the state, and what is due after it may be begun."""
        making = self._making
        if making is None:
            return
        self._wait(making.copied)
        if any(tier.is_due(step) for tier in self.tiers):
            self._wait(making.arrived)

    def finish(self) -> None:
        """Wait until the copies that are being made are where they belong, and make no more."""
        if self._making is not None:
            self._wait(self._making.arrived)
        self.leave()

    def end(self) -> None:
        """Remove all copies, since nothing will be recovered from them any more."""
        deadline_s = time.monotonic() + _COPYING_S
        self.leave()
        while not all(lane.has_ended for lane in self._left_lanes) and time.monotonic() < deadline_s:
            time.sleep(_TURN_S)
        for tier in self.tiers:
            if tier.name in self._storages:
                tier.clear(self._storages[tier.name])
        self._storages, self._kept = {}, {}
        self._pool = HostMemoryPool()

    def leave(self) -> None:
        """Stop making copies, because a fault has ended the generation. What is complete stays."""
        making, lanes = self._making, self._lanes
        self._lanes, self._exchanges, self._making = [], {}, None
        self._left_lanes = [lane for lane in [*self._left_lanes, *lanes] if not lane.has_ended]
        for lane in lanes:
            lane.leave()
        deadline_s = time.monotonic() + _COPYING_S
        while making is not None and making.begun and not making.copied.wait(_TURN_S):
            if time.monotonic() > deadline_s:
                logger.error("the state was not copied to host memory within %g s: that copy is void", _COPYING_S)
                making.void = True
                return

    def _wait(self, event: threading.Event) -> None:
        """Wait interruptibly for an event of what is being made, unless making it was given up."""
        lanes = self._lanes
        if lanes and not event.is_set():
            with awaiting(lanes[0].thread):
                while not event.wait(_TURN_S) and not lanes[0].is_idle:
                    pass

    def _without_busy(self, due: Sequence[Tier]) -> list[Tier]:
        """Learn what became of the last saves in directories, and leave out those that are busy. Collective."""
        known = {tier.name: self._directories[tier.name] for tier in due if not tier.is_memory}
        told = gather([[each.outcome, str(each.last)] for each in known.values()])
        for place, (name, directory) in enumerate(known.items()):
            outcomes = {each[place][0] for each in told}
            if "busy" not in outcomes:
                if all(each[place] == ["whole", str(directory.last)] for each in told):
                    directory.whole = directory.last
                continue
            due = [tier for tier in due if tier.name != name]
            if not directory.has_told and dist.get_rank() == 0:
                logger.warning("%s: the last copy is still being written; this one is left out", name)
            directory.has_told = True
        return list(due)

    # --- in the lanes ---------------------------------------------------------------------------------------------

    def _copy(
        self,
        making: _Making,
        snapshot: Snapshot | None,
        due: Sequence[Tier],
        ready: torch.cuda.Event | None,
        lanes: Sequence[Lane],
    ) -> None:
        """Copy the state to the host, exchange it with the neighbors, and have it written where that is due."""
        making.begun = True
        rank, world, save = dist.get_rank(), dist.get_world_size(), making.save
        parts: dict[tuple[int, int] | None, list[tuple[PartId, Content]]] = defaultdict(list)

        def keep(part: HostPart, owner: int, tiers: Sequence[Tier], clique: tuple[int, int] | None) -> None:
            parts[clique].append((PartId(save, owner), part.content))
            self._kept = {**self._kept, save: [*self._kept.get(save, ()), part]}
            for tier in tiers:
                if tier.is_memory:
                    self._storages[tier.name].write(parts[clique][-1:], rank, world)

        try:
            self._make_room(save)
            mine = self._on_host(snapshot, ready)
            making.copied.set()
            if mine is not None and not making.void:
                keep(mine, rank, due, None)
            for clique, tiers in self._by_clique(due).items():
                for sender, part in self._exchanges[clique].exchange(None if making.void else mine, self._pool):
                    if lanes[0].is_left:
                        return
                    keep(part, sender, tiers, clique)
        finally:
            making.copied.set()
            making.arrived.set()
        for tier in due:
            if not tier.is_memory:
                self._writing[tier.name] = save
                written = [*parts[None], *parts[self._clique(tier)]]
                lanes[1].do(partial(self._write, tier, save, written, bool(parts[None])))

    def _on_host(self, snapshot: Snapshot | None, ready: torch.cuda.Event | None) -> HostPart | None:
        """Copy the state to host memory; return None if there is none or, with a warning, if that is impossible."""
        if snapshot is None:
            return None
        try:
            content = snapshot.content()
            part = laid_out(content, self._pool)
            copy_into(part, content.tensors, ready)
        except (MemoryError, RuntimeError, TypeError) as error:  # torch has no exception of its own for the second
            logger.warning("the state after step %d is not copied: %s", snapshot.step, error)
            return None
        return part

    def _make_room(self, save: SaveId) -> None:
        """Let go of all copies in memory but those of the last save, and what is still being written."""
        assert self.lineage is not None
        before = max((each for each in self._kept if each < save and self.lineage.has(each)), default=None)
        for tier in self.tiers:
            if tier.is_memory:
                self._storages[tier.name].delete_all_but({before})
        used = {before, *self._writing.values()}
        self._kept = {each: parts for each, parts in self._kept.items() if each in used}
        self._pool.keep_only([part for parts in self._kept.values() for part in parts])

    def _by_clique(self, due: Sequence[Tier]) -> dict[tuple[int, int], list[Tier]]:
        found: dict[tuple[int, int], list[Tier]] = defaultdict(list)
        for tier in due:
            if tier.copies:
                found[self._clique(tier)].append(tier)
        return found

    def _write(self, tier: Tier, save: SaveId, parts: _Parts, is_whole: bool) -> None:
        """Write parts to a directory, in which the newest whole save and this one stay.

        Args:
            tier: the directory.
            save: the save.
            parts: what this rank has of it.
            is_whole: whether this rank's own part is among them.
        """
        directory, storage = self._directories[tier.name], self._storages[tier.name]
        try:
            if directory.whole is not None:
                storage.delete_all_but({directory.whole, save})
            storage.write(parts, dist.get_rank(), dist.get_world_size())
        except OSError as error:
            directory.outcome = "failed"
            storage.delete(save)
            logger.warning("%s: the copy of step %d is lost: %s", tier.name, save.iteration, error)
        else:
            directory.outcome = "whole" if is_whole else "failed"
        finally:
            self._writing.pop(tier.name, None)


def _recorded() -> torch.cuda.Event | None:
    """Return an event of this thread's CUDA stream after all that is in its queue; None without CUDA."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record()
    return event
