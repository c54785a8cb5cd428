"""Tiers: copies of the training state besides the ranks that train with it, and how a recovery is made of them.

A :class:`Tier` is a place in which copies are kept: the memory of neighbors, a directory of the node, a directory
that all nodes share. If the living ranks alone cannot give the state back, each rank is filled from the cheapest
copy of the newest step that exists for all ranks.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import torch
import torch.distributed as dist
from typing_extensions import override

from checkpointless.inprocess import UnrecoverableError, active_call_wrapper
from checkpointless.inprocess.communicators.helper_thread import run_in_helper_thread
from checkpointless.inprocess.wrap import span
from checkpointless.launcher.protocol.board import Facts
from checkpointless.observability.telemetry.event_names import LIVING, EventName
from checkpointless.replication.agreement import attempt, by_rank, gather, words
from checkpointless.replication.copier import Copier, Place
from checkpointless.replication.exchange import CliqueExchange, clique_group, cliques_of
from checkpointless.replication.handover import COPIED_AT, Snapshot
from checkpointless.replication.host_memory import recorded
from checkpointless.replication.parts import Content, Part, PartId, SaveId
from checkpointless.replication.retrieval import ANSWER_S, Choice, Search, bring, choose
from checkpointless.replication.store import DirectoryStore, MemoryStore, PartStore, Shelf, open_store
from checkpointless.state.held_state import HeldState
from checkpointless.system.environment import LOCAL_WORLD_SIZE_ENV
from checkpointless.transfer.rank_groups import names as in_words

if TYPE_CHECKING:
    from checkpointless.launcher.protocol.causes import Json

logger = logging.getLogger(__name__)


class Tier(ABC):
    """A place in which copies of all ranks' states are kept.

    A tier of one's own is a subclass with a ``name`` and a ``cost``, and :meth:`open`.

    Args:
        every: a copy is made after each step that is a multiple of this number.
        copies: how many other ranks keep a copy of each rank's state, too.
        jump: how many ranks these are apart; 0: as many as a node has ranks, or 1 if there is only one node.

    Raises:
        ValueError: a number is out of range.

    Attributes:
        name: what the tier is called in messages and events.
        cost: tiers are asked in the order of their costs.
        is_memory: whether what a rank keeps is lost with its process.
        waits: whether training waits until each copy is where it belongs, before the next step begins.
    """

    name: ClassVar[str]
    cost: ClassVar[int]
    is_memory: ClassVar[bool] = False

    def __init__(self, every: int, copies: int, jump: int = 0) -> None:
        if every < 1 or copies < 0 or jump < 0:
            raise ValueError(
                f"a tier needs every >= 1, copies >= 0 and jump >= 0, not {every}, {copies} and {jump}: "
                "a copy is made after each `every` steps and kept on `copies` other ranks, `jump` ranks apart"
            )
        self.every = every
        self.copies = copies
        self.jump = jump
        self.waits = False

    @abstractmethod
    def open(self, job: str, rank: int) -> PartStore:
        """Return the store in which this rank keeps parts, its own and its neighbors'.

        Args:
            job: names the job; a letter or digit each. Parts of other jobs must not be found.
            rank: this rank.

        Raises:
            OSError: the place cannot be used.
        """

    def clear(self, store: PartStore) -> None:
        """Remove what this rank keeps, since the job has ended well. A failure is only logged.

        Args:
            store: what :meth:`open` returned.
        """
        store.delete(lambda save: True)

    def is_due(self, step: int) -> bool:
        """Return whether a copy is to be made after ``step``."""
        return step > 0 and step % self.every == 0

    def distances(self, world_size: int, node_size: int) -> list[int]:
        """Return how many ranks apart the ranks may be that keep each other's copies, the best first.

        Args:
            world_size: the number of ranks of the job.
            node_size: the number of ranks of a node.

        Raises:
            ValueError: the ranks cannot be divided like that; the message says what is possible.
        """
        across = range(node_size, world_size, node_size)
        wanted = [self.jump] if self.jump else [*across, *range(1, min(node_size, world_size))]
        possible = [jump for jump in wanted if world_size % (jump * (self.copies + 1)) == 0]
        best = (wanted or [1])[0]
        if self.copies and (not possible or (not self.jump and world_size > node_size and possible[0] < node_size)):
            copies = "a copy" if self.copies == 1 else f"{self.copies} copies"
            raise ValueError(
                f"{self.name}: {world_size} ranks cannot keep {copies} each, {best} ranks apart: "
                f"the number of ranks has to be a multiple of jump * (copies + 1) = {best * (self.copies + 1)}"
            )
        return possible or [1]


class NeighborMemory(Tier):
    """Keeps copies in the host memory of the rank itself and of other ranks.

    It is for jobs that cannot pay for a second instance of the optimizer. Each rank keeps its own state and those
    of ``copies`` other ranks, of two steps: ``2 * (1 + copies)`` times the state of a rank, in host memory.

    Args:
        every: a copy is made after each step that is a multiple of this number.
        copies: how many other ranks keep a copy of each rank's state, at least 1.
        jump: how many ranks these are apart; 0: as many as a node has ranks, or 1 if there is only one node.
        overlap: copy while the next step is being made. A rank that dies before its copy has arrived costs one more
            step. With False, training waits for the copies, and no finished step is lost, unless a further rank
            dies that was still waiting for its copy when the first died.

    Raises:
        ValueError: a number is out of range.
    """

    name: ClassVar[str] = "neighbor memory"
    cost: ClassVar[int] = 10
    is_memory: ClassVar[bool] = True

    def __init__(self, every: int = 1, copies: int = 1, jump: int = 0, *, overlap: bool = True) -> None:
        if copies < 1:
            raise ValueError(f"copies in the memory of neighbors need copies >= 1, not {copies}")
        super().__init__(every, copies, jump)
        self.waits = not overlap

    @override
    def open(self, job: str, rank: int) -> PartStore:
        return MemoryStore()


class _Directory(Tier):
    """Keeps copies in folders of a directory, or of another place that :func:`open_store` knows."""

    def __init__(self, path: str | os.PathLike[str], every: int, copies: int, jump: int = 0) -> None:
        super().__init__(every, copies, jump)
        self.path = os.fspath(path)

    @override
    def open(self, job: str, rank: int) -> PartStore:
        return open_store(self.path, f"job-{job}")

    @override
    def clear(self, store: PartStore) -> None:
        super().clear(store)
        folder = store.root if isinstance(store, DirectoryStore) else Path(self.path)
        with suppress(OSError):  # another rank's copies are still in it, or it is gone
            while folder != Path(self.path):
                folder.rmdir()
                folder = folder.parent


class LocalDirectory(_Directory):
    """Keeps copies in a directory of the node, which outlives processes, and in those of other nodes.

    Args:
        path: the directory. The tier uses a folder of the job in it.
        every: a copy is made after each step that is a multiple of this number.
        copies: how many other ranks keep a copy of each rank's state. 0: a node that is lost loses them.
        jump: how many ranks these are apart; 0: as many as a node has ranks, or 1 if there is only one node.

    Raises:
        ValueError: a number is out of range.
    """

    name: ClassVar[str] = "local directory"
    cost: ClassVar[int] = 20

    def __init__(self, path: str | os.PathLike[str], every: int = 100, copies: int = 1, jump: int = 0) -> None:
        super().__init__(path, every, copies, jump)


class SharedDirectory(_Directory):
    """Keeps copies in a directory that all nodes share, a folder for each rank.

    Args:
        path: the directory. The tier uses a folder of the job in it.
        every: a copy is made after each step that is a multiple of this number.

    Raises:
        ValueError: a number is out of range.
    """

    name: ClassVar[str] = "shared directory"
    cost: ClassVar[int] = 30

    def __init__(self, path: str | os.PathLike[str], every: int = 1000) -> None:
        super().__init__(path, every, copies=0)

    @override
    def open(self, job: str, rank: int) -> PartStore:
        return open_store(self.path, f"job-{job}", f"rank-{rank}")


#: The tiers by the names that recipes use.
TIERS: Mapping[str, type[Tier]] = {
    "neighbor_memory": NeighborMemory,
    "local_directory": LocalDirectory,
    "shared_directory": SharedDirectory,
}


def make_tiers(settings: Mapping[str, Mapping[str, Any] | None]) -> list[Tier]:
    """Return the tiers of a recipe, by names in :data:`TIERS` or dotted ones; ``ValueError`` says what to do."""
    made = []
    for name, arguments in settings.items():
        kind = TIERS.get(name) or _imported(name)
        try:
            made.append(kind(**(arguments or {})))
        except (TypeError, ValueError) as error:
            raise ValueError(f"tier {name}: {str(error).replace(f'{kind.__name__}.__init__() ', '')}") from error
    return made


def _imported(name: str) -> type[Tier]:
    try:
        kind = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        kind = None
    if not isinstance(kind, type) or not issubclass(kind, Tier):
        raise ValueError(f"no tier is called {name}: use {', '.join(TIERS)}, or the dotted name of your class")
    return kind


# --- The lineage of the running training --------------------------------------------------------------------------
#
# Where numerics are not deterministic, a step that is redone may end in other bytes. So copies of a step are used
# together only if one generation made them all, and only if the training that runs comes from it.

_MOST = 256  # generations; copies of earlier ones are too old to be of use


class _Lineage(msgspec.Struct, frozen=True, array_like=True):
    """The generations whose steps the training comes from, and after which step each began, both ascending."""

    job: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    begun: tuple[tuple[int, int], ...] = ()

    def begin(self, generation: int, step: int) -> _Lineage:
        kept = [(number, after) for number, after in self.begun if after < step and number <= generation]
        if kept and kept[-1][0] == generation:  # another fit of the same block
            return _Lineage(self.job, tuple(kept))
        return _Lineage(self.job, (*kept, (generation, step))[-_MOST:])

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


_TURN_S = 0.02
_COPYING_S = 60.0  # host memory takes seconds for a hundred gigabytes
_FACT = "lineage"


class Copies:
    """Makes copies of this rank's state, and keeps its neighbors'. All ranks call each method together.

    The state is copied to host memory in a thread, sent to neighbors from there, and written to directories in
    another. Training waits for the first before its next update, for the second before copies are due again, for
    the third never: if a directory is too slow, a save is left out. Two tiers of one name: ``ValueError``.
    """

    def __init__(self, tiers: Sequence[Tier] = ()) -> None:
        names = [tier.name for tier in tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"each tier can be given once, not {', '.join(names)}")
        self.tiers: Sequence[Tier] = sorted(tiers, key=lambda tier: tier.cost)
        self.lineage: _Lineage | None = None
        self.stores: dict[str, PartStore] = {}
        self._places: dict[str, Place] = {}
        self._whole: dict[str, SaveId] = {}  # by directory, the newest save that all ranks have
        self._told: set[str] = set()  # the directories that were said to be too slow
        self._exchanges: dict[tuple[int, int], CliqueExchange] = {}
        self._generation = -1  # in which the exchanges were made
        self._copier: Copier | None = None  # None: nothing is copied now
        self._left: list[Copier] = []  # whose threads may still be at their last tasks

    def __bool__(self) -> bool:
        return bool(self.tiers)

    # --- at the begin of a generation -----------------------------------------------------------------------------

    def begin(self, generation: int, step: int, facts: Facts | None, group: Sequence[int]) -> None:
        """Begin to make copies of a training from ``step``; ``group`` holds the same shard. Collective.

        In the first generation, a tier that cannot be used is an ``UnrecoverableError``.
        """
        if generation == self._generation:
            self._wait_for_neighbors()  # an earlier fit of this block, which left its loop
        self.leave()
        self.lineage = self.agree(facts).begin(generation, step)
        if facts is not None:
            facts.keep(_FACT, msgspec.to_builtins(self.lineage))
        self.open(required=generation == 0)
        if generation != self._generation:
            self._exchanges, self._generation = {}, generation
        jumps = _neighborhoods(self.tiers, group)
        self._places = {tier.name: self._place(tier, jumps[tier.name], self.lineage) for tier in self.tiers}
        self._whole, self._told = {}, set()
        self._copier = Copier("copying the state", [*self._places.values()], self._of_use, self.lineage.has)

    def _place(self, tier: Tier, jump: int, lineage: _Lineage) -> Place:
        """Return the place of a tier in this generation. Collective."""
        exchange, clique = None, (jump, tier.copies + 1)
        if tier.copies:
            if clique not in self._exchanges:
                self._exchanges[clique] = CliqueExchange(clique_group(*clique))
            exchange = self._exchanges[clique]
        store, before = self.stores[tier.name], self._places.get(tier.name)
        if isinstance(store, MemoryStore):  # a thread of the generation before may still use the old one
            store = self.stores[tier.name] = store.copy()
        known = before.present if before is not None and tier.is_memory else ()
        present = frozenset(save for save in known if lineage.has(save))
        return Place(tier.name, store, tier.is_memory, exchange, present)

    def agree(self, facts: Facts | None) -> _Lineage:
        """Learn what the training comes from (else a new lineage), and require the same tiers. Collective."""
        known = self.lineage
        if known is None and facts is not None and facts.get(_FACT) is not None:
            known = msgspec.convert(facts.get(_FACT), _Lineage)
        mine: list[Json] = [[tier.name, tier.every, tier.copies, tier.jump] for tier in self.tiers]
        told = gather([mine, msgspec.to_builtins(known), secrets.token_hex(8)])
        if any(each[0] != told[0][0] for each in told):
            names = [str([tier[0] for tier in each[0]]) for each in told]
            raise UnrecoverableError(by_rank("the ranks were given different tiers", names))
        lineages = [msgspec.convert(each[1], _Lineage) for each in told if each[1] is not None]
        self.lineage = max(lineages, key=lambda each: each.newest) if lineages else _Lineage(told[0][2])
        return self.lineage

    def open(self, required: bool = False) -> None:
        """Open all tiers, once; one that cannot be used raises if ``required``, else only warns. Collective."""
        assert self.lineage is not None
        problems = []
        for tier in self.tiers:
            if tier.name in self.stores:
                continue
            open_ = partial(tier.open, self.lineage.job, dist.get_rank())
            store, problem = attempt(partial(run_in_helper_thread, open_, ANSWER_S))
            if store is None:
                problems.append(f"{tier.name}: {words(problem)}")
                store = _UnusableStore(words(problem))
            self.stores[tier.name] = store
        told = [str(each) for each in gather("; ".join(problems))]
        if any(told) and required:
            raise UnrecoverableError(by_rank("copies of the state cannot be kept", told))
        for each in problems:
            logger.warning("no copies are kept here until this process ends: %s", each)

    # --- a recovery from copies -----------------------------------------------------------------------------------

    def take(self, held: HeldState | None, refusal: str) -> tuple[Snapshot | None, str]:
        """Find the newest step that living ranks and tiers have whole; return its state, why not. Collective."""
        call, rank = active_call_wrapper(), dist.get_rank()
        with span(EventName.COPIES, why=refusal) as fields:
            lineage = self.agree(call.facts if call is not None else None)
            self.open()
            whole = held is not None and not held.commit.torn and COPIED_AT in held.moments
            living = lineage.save(held.commit.committed) if whole and held is not None else None
            search = Search(
                self.stores,
                dist.get_world_size(),
                lambda copy, is_own: copy.read(is_shared=not is_own),
                {LIVING: [] if living is None else [PartId(living, rank)]},
            )
            tiers = [tier.name for tier in self.tiers]
            choice, read = search.read(
                lambda unusable: choose(search.holdings, [LIVING, *tiers], lineage.has, unusable)
            )
            if choice.save is None:
                reason = _why(choice, tiers)
                fields.update(reason=reason)
                return None, reason
            content, nbytes = bring(choice, read)
            mine, step = choice.copies[rank], choice.save.iteration
            lost = max(0, (call.high_water if call is not None else step) - step)
            fields.update(step=step, tier=mine.place, holder=mine.holder, bytes=nbytes, steps_lost=lost)
        if mine.place != LIVING:
            logger.warning("after step %d, from %s of rank %d: %s", step, mine.place, mine.holder, refusal)
        return None if content is None else Snapshot.of(content), ""

    # --- while training -------------------------------------------------------------------------------------------

    def make(self, step: int, take: Callable[[], Snapshot | None]) -> None:
        """Begin to copy the state after ``step``, which ``take`` returns, into tiers that are due. Collective."""
        copier, lineage = self._copier, self.lineage
        if copier is None or lineage is None:
            return
        # What this generation went on from may still be being written to directories by the one before.
        again = step == lineage.begun[-1][1]
        due = [tier for tier in self.tiers if tier.is_due(step) and (tier.is_memory or not again)]
        due = self._without_busy(due) if any(not tier.is_memory for tier in due) else due
        save = lineage.save(step)
        if not due or save is None:
            return
        places = [self._places[tier.name] for tier in due]
        making = copier.begin(save, partial(_copied, copier, take(), recorded()), places)
        if any(tier.waits for tier in due):
            self._wait(copier, making.arrived)

    def settle(self, step: int) -> None:
        """Wait until the update of ``step`` may change the state, and what is due after it may be begun."""
        copier = self._copier
        if copier is None or copier.making is None:
            return
        self._wait(copier, copier.making.copied)
        if any(tier.is_due(step) for tier in self.tiers):
            self._wait(copier, copier.making.arrived)

    def finish(self) -> None:
        """Wait until the copies that are being made are where they belong, and make no more."""
        copier = self._copier
        if copier is not None and copier.making is not None:
            self._wait(copier, copier.making.arrived)
        self.leave()

    def end(self) -> None:
        """Remove all copies, since nothing will be recovered from them any more."""
        deadline_s = time.monotonic() + _COPYING_S
        self._wait_for_neighbors()
        self.leave()
        while not all(each.has_ended for each in self._left) and time.monotonic() < deadline_s:
            time.sleep(_TURN_S)
        for tier in self.tiers:
            if tier.name in self.stores:
                clear = partial(tier.clear, self.stores[tier.name])
                _, problem = attempt(partial(run_in_helper_thread, clear, ANSWER_S))
                if problem is not None:
                    logger.warning("%s: copies may be left: %s", tier.name, words(problem))
        self.stores, self._exchanges, self._places = {}, {}, {}

    def leave(self) -> None:
        """Stop making copies, because a fault has ended the generation. What is complete stays."""
        copier = self._copier
        if copier is None:
            return
        copier.leave()
        making, deadline_s = copier.making, time.monotonic() + _COPYING_S
        while making is not None and making.begun and not making.copied.wait(_TURN_S):
            if time.monotonic() > deadline_s:
                logger.error("the state was not copied to host memory within %g s: that copy is void", _COPYING_S)
                making.void = True
                break
        self._left = [each for each in [*self._left, copier] if not each.has_ended]
        self._copier = None

    def _wait_for_neighbors(self) -> None:
        """Wait, for a minute at most, until neighbors have what they wait for, since there was no fault."""
        copier = self._copier
        if copier is None or copier.making is None:
            return
        if not copier.wait(copier.making.arrived, _COPYING_S):
            logger.warning("copies of the state did not arrive within %g s", _COPYING_S)

    def _wait(self, copier: Copier, event: Event) -> None:
        """Wait interruptibly for an event; raise what has ended the copying: a neighbor is gone."""
        copier.wait(event)
        if copier.error is not None:
            raise copier.error

    def _of_use(self, place: Place, save: SaveId) -> Collection[SaveId]:
        """Return what stays in a place while ``save`` is made: its newest save that is whole."""
        if place.is_memory:
            newest = max((each for each in place.present if each <= save), default=None)
            return () if newest is None else (newest,)
        whole = self._whole.get(place.name)
        # As long as it is not known which one is whole, only copies of another training are of no use.
        return place.present if whole is None else (whole,)

    def _without_busy(self, due: Sequence[Tier]) -> list[Tier]:
        """Learn which saves all ranks have in directories, and leave out those that are busy. Collective."""
        stuck = {name for each in self._left for name in each.unfinished}
        places = [self._places[tier.name] for tier in due if not tier.is_memory]
        told = gather([[place.is_busy or place.name in stuck, sorted(map(str, place.present))] for place in places])
        busy = {place.name for number, place in enumerate(places) if any(each[number][0] for each in told)}
        for number, place in enumerate(places):
            everywhere = set.intersection(*({*each[number][1]} for each in told))
            if everywhere:
                self._whole[place.name] = max(map(SaveId.parse, everywhere))
        for name in busy - self._told:
            self._told.add(name)
            if dist.get_rank() == 0:
                logger.warning("%s: the last copy is still being written; this one is left out", name)
        return [tier for tier in due if tier.name not in busy]


def _copied(copier: Copier, snapshot: Snapshot | None, ready: torch.cuda.Event | None) -> Content | None:
    return None if snapshot is None else copier.pool.copy(snapshot.content(), ready)


class _UnusableStore:
    """Stands for a place that cannot be used by this process: it has nothing and keeps nothing."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def write(self, part: Part, holder: int) -> None:
        raise OSError(self._problem)

    def shelf(self, world_size: int) -> Shelf:
        return {}

    def delete(self, is_meant: Callable[[SaveId], bool]) -> None:
        pass


# --- who is whose neighbor ----------------------------------------------------------------------------------------


def _neighborhoods(tiers: Sequence[Tier], group: Sequence[int]) -> Mapping[str, int]:
    """Return each tier's distance of copies, if possible out of a ``group`` lost at once. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = gather(int(os.environ.get(LOCAL_WORLD_SIZE_ENV, world)))
    node = int(sizes[0])
    if len(set(sizes)) > 1 and any(tier.copies and not tier.jump for tier in tiers):
        raise UnrecoverableError(
            f"nodes have different numbers of ranks, {sorted(set(sizes))}: say with jump how far apart copies are"
        )
    possible = {}
    for tier in tiers:
        try:
            possible[tier.name] = tier.distances(world, node)
        except ValueError as error:
            raise UnrecoverableError(str(error)) from error

    def is_good(tier: Tier, jump: int) -> bool:
        clique = next(each for each in cliques_of(world, jump, tier.copies + 1) if rank in each)
        return not tier.copies or len(group) == 1 or not {*clique} <= {*group}

    told = gather({tier.name: [jump for jump in possible[tier.name] if is_good(tier, jump)] for tier in tiers})
    found = {}
    for tier in tiers:
        jumps = possible[tier.name]
        good = [jump for jump in jumps if all(jump in each[tier.name] for each in told)]
        found[tier.name] = (good or jumps)[0]
        if not good and rank == 0:
            logger.warning(
                "%s: copies are kept by ranks that hold the same shard, %d ranks apart, and are lost with them: "
                "give another jump",
                tier.name,
                jumps[0],
            )
    return found


def _why(choice: Choice, tiers: list[str]) -> str:
    names = ", ".join(tiers)
    if not choice.lacking:
        return f"no tier ({names}) has a copy of the state"
    save, ranks = next(iter(choice.lacking.items()))
    of = f"rank{'s' * (len(ranks) > 1)} {in_words(ranks)}"
    return f"no tier ({names}) has the state of {of} after step {save.iteration}"
