"""Copies while training goes on: to host memory, to the peers, and to the places that keep them, in threads.

What one generation's threads use, no later one's do: a thread that ends late finds nothing that it could spoil.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from checkpointless.inprocess.communicators.helper_thread import awaiting
from checkpointless.replication.agreement import attempt, own_rank, world_size
from checkpointless.replication.exchange import CliqueExchange
from checkpointless.replication.host_memory import HostMemoryPool
from checkpointless.replication.parts import Content, Part, PartId, SaveId
from checkpointless.replication.store import PartStore, write_parts

logger = logging.getLogger(__name__)

_LEAVING_S = 5.0  # an error that is followed by a fault's notice belongs to that fault
_TURN_S = 0.02


class _Lane:
    """Does tasks in a thread, in their order, until one fails or the lane is left."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._asked = 0  # how many tasks; counted by the thread that gives them
        self._done = 0  # counted by the lane
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"checkpointless-{name}", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        return self._done >= self._asked or not self._thread.is_alive()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def thread(self) -> int | None:
        return self._thread.ident

    @property
    def is_left(self) -> bool:
        return self._left.is_set()

    def do(self, task: Callable[[], None]) -> None:
        self._asked += 1
        self._tasks.put(task)

    def leave(self) -> None:
        """Begin no task any more. One that is being done ends by itself."""
        self._left.set()
        self._tasks.put(None)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None and not self._left.is_set():
            try:
                task()
            except Exception as error:
                if not self._left.wait(_LEAVING_S):
                    logger.exception("%s: no task is done any more until the next recovery: %s", self._name, error)
                return
            finally:
                self._done += 1
            task = None  # it may hold a copy of the state


@dataclass(eq=False)
class Place:
    """A place that keeps copies, in one generation.

    This process's memory (``is_memory``) answers at once and is lost with it. Without an ``exchange``, each rank
    keeps its own. ``present``: saves whose parts of this rank are all there.
    """

    name: str
    store: PartStore
    is_memory: bool = False
    exchange: CliqueExchange | None = None
    present: frozenset[SaveId] = frozenset()
    is_busy: bool = False

    def note(self, save: SaveId, written: int) -> None:
        if written == (1 if self.exchange is None else len(self.exchange.members)):
            self.present |= {save}

    def delete(self, is_meant: Callable[[SaveId], bool]) -> None:
        self.store.delete(is_meant)
        self.present = frozenset(save for save in self.present if not is_meant(save))


@dataclass(eq=False)
class Making:
    """Copies that are being made."""

    save: SaveId
    begun: bool = False  # whether the state is being copied to the host
    void: bool = False  # whether training may have changed the state before it was copied
    error: Exception | None = None
    unwritten: set[Place] = field(default_factory=set)
    copied: threading.Event = field(default_factory=threading.Event)  # set when training may change the state
    # set when the peers' parts are here, and this rank's part is there
    arrived: threading.Event = field(default_factory=threading.Event)
    # set when no place is left to which parts are to be written (``unwritten``)
    written: threading.Event = field(default_factory=threading.Event)


#: Returns which other saves stay in a place when one is written; None: all do.
Keep = Callable[[Place, SaveId], Collection[SaveId] | None]


class Copier:
    """Makes copies in one generation; ``making`` are those begun last.

    ``is_of_use``: whether a save in a place may be (None: nobody asks). ``error`` ended an exchange: what peers
    wait for is not known any more.
    """

    def __init__(
        self, doing: str, places: Sequence[Place], keep: Keep, is_of_use: Callable[[SaveId], bool] | None = None
    ) -> None:
        self._places, self._keep = places, keep
        self._rank, self._world_size = own_rank(), world_size()
        self.pool = HostMemoryPool()
        self.making: Making | None = None
        self.error: Exception | None = None
        self._lane = _Lane(doing)
        # One for each place that may not answer, so that it holds up no other.
        self._writers = {place: _Lane(f"{doing} ({place.name})") for place in places if not place.is_memory}
        for place, writer in self._writers.items():
            if is_of_use is not None:
                writer.do(partial(_attempt, place, partial(self._look, place, is_of_use)))

    # --- for the main thread --------------------------------------------------------------------------------------

    @property
    def is_left(self) -> bool:
        """Whether nothing is begun any more."""
        return self._lane.is_left

    @property
    def can_exchange(self) -> bool:
        """Whether parts can be exchanged now: nothing has failed, and nothing is being exchanged."""
        return self.error is None and not self._lane.has_ended and self._lane.is_idle

    @property
    def has_ended(self) -> bool:
        """Whether all threads are gone."""
        return self._lane.has_ended and not self.unfinished

    @property
    def unfinished(self) -> list[str]:
        """The places whose threads are there, and after :meth:`leave` still write."""
        return [place.name for place, writer in self._writers.items() if not writer.has_ended]

    def begin(
        self, save: SaveId, take: Callable[[], Content | None], due: Sequence[Place], exchanges: bool = True
    ) -> Making:
        """Begin to copy what ``take`` returns, if any; a place still writing is left out, with a warning."""
        making = self.making = Making(save)
        ready = [place for place in due if not place.is_busy]
        for place in due:
            if place.is_busy:
                logger.warning("%s is not kept in %s: the one before is still written", save, place.name)
            elif not place.is_memory:
                place.is_busy = True
                making.unwritten.add(place)
        if not making.unwritten:
            making.written.set()
        met = dict.fromkeys(place.exchange for place in due if exchanges and place.exchange is not None)
        self._lane.do(partial(self._bring, making, [take], ready, list(met)))
        return making

    def wait(self, event: threading.Event, limit_s: float = math.inf) -> bool:
        """Wait interruptibly for an event or the end of all making; return whether within ``limit_s``."""
        if event.is_set():
            return True
        deadline_s = time.monotonic() + limit_s
        with awaiting(self._lane.thread):
            while not event.wait(_TURN_S) and not self._lane.has_ended:
                if time.monotonic() > deadline_s:
                    return False
        return True

    def delete(self, is_meant: Callable[[SaveId], bool]) -> None:
        """Delete copies of saves: in memory now, elsewhere as soon as the place answers."""
        for place in self._places:
            task = partial(_attempt, place, partial(place.delete, is_meant))
            if place.is_memory:
                task()
            else:
                self._writers[place].do(task)

    def leave(self) -> None:
        """Begin nothing any more. What is complete stays."""
        for lane in (self._lane, *self._writers.values()):
            lane.leave()

    # --- in the copying thread ------------------------------------------------------------------------------------

    def _bring(
        self,
        making: Making,
        take: list[Callable[[], Content | None]],
        places: Sequence[Place],
        exchanges: Sequence[CliqueExchange],
    ) -> None:
        parts: dict[CliqueExchange | None, list[Part]] = defaultdict(list)
        making.begun = True  # before it is looked whether the lane is left: who leaves looks the other way round
        try:
            if self.is_left:
                return
            for place in places:
                if place.is_memory:
                    self._make_room(place, making.save)
            content = self._taken(making, take.pop())
            making.copied.set()  # before digests are computed: training waits for it
            mine = None
            if content is not None and not making.void:
                mine = Part.sealed(PartId(making.save, self._rank), self._world_size, content)
            parts[None] = [] if mine is None else [mine]
            memories = [place for place in places if place.is_memory]
            written = {place: write_parts(place.store, parts[None], self._rank) for place in memories}
            for exchange in exchanges:
                for part in self._arriving(making, exchange, mine):
                    parts[exchange].append(part)
                    for place in memories:
                        if place.exchange is exchange:
                            written[place] += write_parts(place.store, [part], self._rank)
            for place, number in written.items():
                place.note(making.save, number)
        finally:
            making.copied.set()
            making.arrived.set()
        for place in places:
            if not place.is_memory:
                theirs = parts[place.exchange] if place.exchange is not None else []
                self._writers[place].do(partial(self._write, place, making, [*parts[None], *theirs]))

    def _taken(self, making: Making, take: Callable[[], Content | None]) -> Content | None:
        """Return this rank's state; None if there is none or, with a warning, if it cannot be copied."""
        try:
            return take()
        except (MemoryError, RuntimeError, TypeError) as error:  # torch has no exception of its own for the first
            logger.warning("the state after step %d is not copied: %s", making.save.iteration, error)
            return None

    def _arriving(self, making: Making, exchange: CliqueExchange, mine: Part | None) -> Iterator[Part]:
        """Yield the parts that the peers send; after an error nothing is exchanged any more."""
        if self.error is not None:
            return
        try:
            for sender, part in exchange.exchange(mine, self.pool):
                if self.is_left:
                    return
                if part.id != PartId(making.save, sender):
                    raise ValueError(f"rank {sender} sent {part.id} for {making.save}")
                yield part
        except Exception as error:  # noqa: BLE001 - whatever it is, the peers and this rank are not in step
            making.error = self.error = error  # its frames hold the memory in which messages may still arrive

    # --- in the thread of a place ---------------------------------------------------------------------------------

    def _look(self, place: Place, is_of_use: Callable[[SaveId], bool]) -> None:
        shelf = place.store.shelf(self._world_size)
        found = {save for save, parts in shelf.items() if self._rank in parts and is_of_use(save)}
        place.present |= found

    def _make_room(self, place: Place, save: SaveId) -> None:
        keep = self._keep(place, save)
        if keep is not None:
            used = {*keep, save}
            _attempt(place, partial(place.delete, lambda each: each not in used))

    def _write(self, place: Place, making: Making, parts: Sequence[Part]) -> None:
        try:
            if not self._writers[place].is_left:
                self._make_room(place, making.save)
                place.note(making.save, write_parts(place.store, parts, self._rank))
        finally:
            place.is_busy = False
            making.unwritten.discard(place)
            if not making.unwritten:
                making.written.set()


def _attempt(place: Place, call: Callable[[], object]) -> None:
    """Call a function; a warning says what it raised: a place costs no more than its copies."""
    _, problem = attempt(call)  # a disk that is full or gone, or a place of the user's own
    if problem is not None:
        logger.warning("%s: %s", place.name, problem)
