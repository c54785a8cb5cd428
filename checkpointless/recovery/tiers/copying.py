"""Copies of this rank's state in one generation: to the host, to the neighbors, to directories, in threads.

What one generation's threads use, no later one's do: a thread that ends late finds nothing that it could spoil.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.part_id import PartId, SaveId
from checkpointless.local_checkpoint.part_storage import PartStorage, Shelf
from checkpointless.recovery.tiers.clique_exchange import CliqueExchange
from checkpointless.recovery.tiers.host_part import HostMemoryPool, HostPart, copy_into, laid_out, recorded
from checkpointless.recovery.tiers.lane import Lane
from checkpointless.recovery.tiers.lineage import Lineage
from checkpointless.recovery.tiers.snapshot import Snapshot
from checkpointless.recovery.tiers.tier import Tier

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

Clique = tuple[int, int]  # how many ranks apart its members are, and how many other members there are


@dataclass
class Making:
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
class Directory:
    """What this rank knows of a tier that is no memory.

    Attributes:
        last: the save that was begun last in this generation; None: none was.
        outcome: what became of it: "busy", "whole" (this rank's parts are there) or "failed".
        present: this rank's parts that were there when the generation began.
        whole: the newest save that all ranks have; None: it is not known yet.
        has_told: whether it was said that the tier is too slow.
    """

    last: SaveId | None = None
    outcome: str = "failed"
    present: frozenset[SaveId] = frozenset()
    whole: SaveId | None = None
    has_told: bool = False


@dataclass(eq=False)
class _Write:
    """A save that is being written to a directory, or waits for it: its memory is in use."""

    save: SaveId
    has_begun: bool = False


class Copying:
    """Makes copies in one generation.

    Args:
        tiers: the tiers, the cheapest first.
        storages: their storages, by name. Those in memory are this generation's alone.
        cliques: the clique of each tier that has one, by name.
        exchanges: the exchanges of these cliques.
        lineage: what the training comes from.
        last: the generation before, whose parts in memory those storages have; None: there was none.

    Attributes:
        directories: what is known of the tiers that are no memory, by name.
        kept: the parts in this rank's memory, by save and rank.
        complete: of each tier in memory the saves of which it has all parts that it should, in their order.
        making: the copies that were begun last; None: none were.
        error: what ended the copying, beside a fault; None: nothing has.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        storages: Mapping[str, PartStorage],
        cliques: Mapping[str, Clique],
        exchanges: Mapping[Clique, CliqueExchange],
        lineage: Lineage,
        last: Copying | None = None,
    ) -> None:
        self._tiers = tiers
        self._storages = dict(storages)
        self._cliques = cliques
        self._exchanges = exchanges
        self._lineage = lineage
        self._pool = HostMemoryPool()
        self._writes: list[_Write] = []
        self.directories = {tier.name: Directory() for tier in tiers if not tier.is_memory}
        self.kept: dict[SaveId, Mapping[int, HostPart]] = dict(last.kept) if last is not None else {}
        before = last.complete if last is not None else {}
        self.complete: dict[str, Sequence[SaveId]] = {
            tier.name: [save for save in before.get(tier.name, ()) if lineage.has(save)]
            for tier in tiers
            if tier.is_memory
        }
        self.making: Making | None = None
        self.error: Exception | None = None
        self._copier = Lane("copying the state")
        # One for each directory: one that does not answer holds up no other.
        self._writers = {name: Lane(f"writing copies of the state ({name})") for name in self.directories}
        for name, writer in self._writers.items():
            writer.do(partial(self._look, name))

    # --- for the main thread --------------------------------------------------------------------------------------

    @property
    def thread(self) -> int | None:
        """The identifier of the thread that waits for neighbors."""
        return self._copier.thread

    @property
    def is_idle(self) -> bool:
        """Whether nothing is copied, and nothing will be without being asked for."""
        return self._copier.is_idle

    @property
    def has_ended(self) -> bool:
        """Whether all threads are gone."""
        return self._copier.has_ended and all(each.has_ended for each in self._writers.values())

    @property
    def unfinished(self) -> list[str]:
        """The directories that are still being written to, although the generation was left."""
        return [name for name, writer in self._writers.items() if not writer.has_ended]

    def begin(self, save: SaveId, snapshot: Snapshot | None, due: Sequence[Tier]) -> Making:
        """Begin to copy.

        Args:
            save: the name of the copies.
            snapshot: the state, its tensors as they live; None: this rank has none to copy.
            due: the tiers in which they are due.
        """
        for tier in due:
            if not tier.is_memory:
                self.directories[tier.name].last, self.directories[tier.name].outcome = save, "busy"
        making = self.making = Making(save)
        # In a list, from which it is taken: nothing may hold the live tensors any longer than their copy takes.
        self._copier.do(partial(self._copy, making, [snapshot], due, recorded()))
        return making

    def leave(self) -> None:
        """Begin nothing any more. What is complete stays."""
        for writer in self._writers.values():
            writer.leave()
        self._copier.leave()  # as the last: it takes back the memory of what no writer will begin

    # --- in the copying thread ------------------------------------------------------------------------------------

    def _copy(
        self, making: Making, snapshot: list[Snapshot | None], due: Sequence[Tier], ready: torch.cuda.Event | None
    ) -> None:
        """Copy the state to the host, exchange it with the neighbors, and have it written where that is due."""
        parts: dict[Clique | None, list[tuple[PartId, Content]]] = defaultdict(list)
        making.begun = True  # before it is looked whether the lane is left: who leaves looks the other way round
        try:
            if self._copier.is_left:
                return
            self._make_room(making.save)
            if self._copier.is_left:  # then what was made room of may be in use after all
                return
            mine = self._on_host(snapshot.pop(), ready)
            making.copied.set()
            mine = None if making.void else mine
            if mine is not None:
                self._keep(mine, PartId(making.save, dist.get_rank()), due, parts[None])
            for clique, tiers in self._by_clique(due).items():
                for sender, part in self._exchanges[clique].exchange(mine, self._pool):
                    if self._copier.is_left:
                        return
                    self._keep(part, PartId(making.save, sender), tiers, parts[clique])
            self._note_complete(making.save, due, parts)
        except Exception as error:
            self.error = error  # before the events: who waits for them looks at it
            raise
        finally:
            making.copied.set()
            making.arrived.set()
        for tier in due:
            if not tier.is_memory:
                written = [*parts[None], *(parts[self._cliques[tier.name]] if tier.copies else ())]
                write = _Write(making.save)
                self._writes.append(write)
                self._writers[tier.name].do(partial(self._write, tier, write, written, bool(parts[None])))

    def _keep(
        self, part: HostPart, name: PartId, tiers: Sequence[Tier], parts: list[tuple[PartId, Content]]
    ) -> None:
        parts.append((name, part.content))
        self.kept = {**self.kept, name.save: {**self.kept.get(name.save, {}), name.part: part}}
        for tier in tiers:
            if tier.is_memory:
                try:
                    self._storages[tier.name].write(parts[-1:], dist.get_rank(), dist.get_world_size())
                except (OSError, ValueError, RuntimeError) as error:  # of a tier of the user's own
                    logger.warning("%s: %s is not kept: %s", tier.name, name.words, error)

    def _note_complete(
        self, save: SaveId, due: Sequence[Tier], parts: Mapping[Clique | None, Sequence[tuple[PartId, Content]]]
    ) -> None:
        """Note in which tiers in memory all parts of ``save`` are that belong there."""
        for tier in due:
            others = len(parts.get(self._cliques[tier.name], ())) if tier.copies else 0
            if tier.is_memory and parts[None] and others == tier.copies:
                known = [each for each in self.complete[tier.name] if each != save]
                self.complete[tier.name] = [*known, save][-2:]

    def _make_room(self, save: SaveId) -> None:
        """Let go of what is in memory, but for each tier's newest complete save and what is still being written."""
        used: set[SaveId | None] = set()
        for tier in self._tiers:
            if tier.is_memory:
                before = max((each for each in self.complete[tier.name] if each <= save), default=None)
                self._storages[tier.name].delete_all_but({before})
                used.add(before)
        is_left = self._copier.is_left
        used |= {write.save for write in list(self._writes) if write.has_begun or not is_left}
        self.kept = {each: parts for each, parts in self.kept.items() if each in used}
        self._pool.keep_only([part for parts in self.kept.values() for part in parts.values()])

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

    def _by_clique(self, due: Sequence[Tier]) -> dict[Clique, list[Tier]]:
        found: dict[Clique, list[Tier]] = defaultdict(list)
        for tier in due:
            if tier.copies:
                found[self._cliques[tier.name]].append(tier)
        return found

    # --- in a directory's thread ----------------------------------------------------------------------------------

    def _look(self, tier: str) -> None:
        """Look which of this rank's parts are in a directory."""
        rank = dist.get_rank()
        storage = self._storages[tier]

        def shelf_of() -> Shelf:
            return storage.shelf(rank, dist.get_world_size())

        shelf = _attempt(f"{tier}: nothing is known of earlier copies", shelf_of)
        found = {save for save, parts in (shelf or {}).items() if rank in parts and self._lineage.has(save)}
        self.directories[tier].present = frozenset(found)

    def _write(self, tier: Tier, write: _Write, parts: Sequence[tuple[PartId, Content]], is_whole: bool) -> None:
        """Write parts to a directory, in which the newest whole save and this one stay.

        Args:
            tier: the directory.
            write: which save it is.
            parts: what this rank has of it.
            is_whole: whether this rank's own part is among them.
        """
        directory, storage = self.directories[tier.name], self._storages[tier.name]
        write.has_begun = True  # before it is looked whether the lane is left: the copier looks the other way round
        if self._writers[tier.name].is_left:
            return
        outcome = "failed"

        def put() -> bool:
            # As long as it is not known which one is whole, only copies of another training are of no use.
            useful = {directory.whole} if directory.whole is not None else directory.present
            storage.delete_all_but({*useful, write.save, directory.last})
            storage.write(parts, dist.get_rank(), dist.get_world_size())
            return True

        try:
            if _attempt(f"{tier.name}: the copy of step {write.save.iteration} is lost", put) and is_whole:
                outcome = "whole"
        finally:
            directory.outcome = outcome
            self._writes.remove(write)


def _attempt(words: str, call: Callable[[], _T]) -> _T | None:
    """Return what ``call`` returned; None, with a warning, if it raised: a tier costs no more than its copies."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - a disk that is full or gone, or a tier of the user's own
        logger.warning("%s: %s", words, error)
        return None
