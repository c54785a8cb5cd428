"""A rank of this benchmark: it waits in a collective, is freed, and takes part in the next default group."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Protocol

import torch
import torch.distributed as dist

from checkpointless.inprocess.communicators.process_groups import process_groups

HOST = "127.0.0.1"
LIMIT = timedelta(seconds=60)
BLOCKED_S = 0.2
_TURN_S = 0.0005


@dataclass(frozen=True)
class Round:
    """What all ranks are told before a round.

    Attributes:
        number: counts the groups, from 1.
        port: of a store that nobody has used.
    """

    number: int
    port: int


@dataclass(frozen=True)
class Timing:
    """What a rank has measured from the word to recover on.

    Attributes:
        freed_s: until its main thread had left the collective; 0 for a new process.
        total_s: until the first collective of the new group was done.
        cpu_s: the time of the processor, of all threads, up to there.
        is_new: whether the process has taken the place of one that was killed.
    """

    freed_s: float
    total_s: float
    cpu_s: float
    is_new: bool


class Way(Protocol):
    """How a rank comes from one default group to the next."""

    def free(self, told: Round, is_out: threading.Event) -> None:
        """Free the main thread, in another one; return when ``is_out``."""

    def regroup(self, told: Round, has_group: bool, meet: Callable[[str], None]) -> None:
        """Make the new group, in the main thread.

        Args:
            told: the round.
            has_group: whether this process was in the group before.
            meet: waits for all ranks at a place of that name.
        """


class Anew:
    """As checkpointless does: connections are cut, groups are destroyed, and the next one is made."""

    def __init__(self, rank: int, ranks: int, port: int) -> None:
        os.environ.update(
            MASTER_ADDR=HOST, RANK=str(rank), WORLD_SIZE=str(ranks), TORCHELASTIC_USE_AGENT_STORE="True"
        )
        process_groups.install()

    def free(self, told: Round, is_out: threading.Event) -> None:
        process_groups.abort()
        while not is_out.wait(0.05):
            process_groups.cut()

    def regroup(self, told: Round, has_group: bool, meet: Callable[[str], None]) -> None:
        if has_group:
            process_groups.hold()
            process_groups.destroy()
        meet("left")
        process_groups.release()
        os.environ["MASTER_PORT"] = str(told.port)
        dist.init_process_group("gloo", timeout=LIMIT)


class Reconfigured:
    """As torch does: the group stays, and its ranks reconfigure it, which frees those that wait in it."""

    def __init__(self, rank: int, ranks: int, port: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._store = dist.TCPStore(HOST, port, ranks, False, timeout=LIMIT)
        store = dist.PrefixStore("job", self._store)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=LIMIT,
            enable_reconfigure=True,  # type: ignore[call-arg]  # since torch 2.14
        )

    def free(self, told: Round, is_out: threading.Event) -> None:
        self._reconfigure(told)
        is_out.wait()

    def regroup(self, told: Round, has_group: bool, meet: Callable[[str], None]) -> None:
        if not has_group:
            self._reconfigure(told)

    def _reconfigure(self, told: Round) -> None:
        at = f"handles/{told.number}"
        self._store.set(f"{at}/{self._rank}", dist._get_reconfigure_handle())  # type: ignore[attr-defined]  # since torch 2.14
        handles = [self._store.get(f"{at}/{rank}").decode() for rank in range(self._ranks)]
        work = dist._reconfigure(  # type: ignore[attr-defined]  # since torch 2.14
            uuid=told.number, handles=handles, timeout=LIMIT
        )
        work.wait()


WAYS: dict[str, Callable[[int, int, int], Way]] = {"anew": Anew, "reconfigured": Reconfigured}


def serve(name: str, rank: int, ranks: int, ports: tuple[int, int], pipe: Connection) -> None:
    """Take part in rounds until ``None`` comes instead of one; this is the whole process of a rank.

    Args:
        name: of the way.
        rank: this one.
        ranks: how many there are.
        ports: of the job's store, and of the one through which ranks meet.
        pipe: to the benchmark, which sends each round, hears that this rank waits, and sends the word to recover.
    """
    torch.set_num_threads(1)
    places = dist.TCPStore(HOST, ports[1], ranks, False, timeout=LIMIT)
    way = WAYS[name](rank, ranks, ports[0])
    has_group = False
    pipe.send("ready")
    while (told := pipe.recv()) is not None:

        def meet(place: str, number: int = told.number) -> None:
            key = f"{number}/{place}"
            places.add(key, 1)
            while places.add(key, 0) < ranks:
                time.sleep(_TURN_S)

        pipe.send(_round(way, told, rank, has_group, meet, pipe))
        has_group = True
    os._exit(0)  # threads of groups that were left may still wait


def _round(
    way: Way, told: Round, rank: int, has_group: bool, meet: Callable[[str], None], pipe: Connection
) -> Timing:
    """Wait in a collective that rank 0 does not join, be freed, and return how long the way took."""
    word, is_out = threading.Event(), threading.Event()
    began: list[float] = []

    def hear() -> None:
        if has_group:
            time.sleep(BLOCKED_S)  # the main thread is in the collective by then
        pipe.send("blocked")
        pipe.recv()
        began.extend((time.monotonic(), time.process_time()))
        word.set()
        if has_group:
            way.free(told, is_out)

    hearing = threading.Thread(target=hear)
    hearing.start()
    if has_group and rank != 0:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError:
            pass  # gloo's, when a connection ends
        else:
            raise AssertionError("rank 0 was not in this collective")
    left_s = time.monotonic()
    word.wait()  # a rank that was killed may have freed this one before
    is_out.set()
    hearing.join()
    way.regroup(told, has_group, meet)
    dist.all_reduce(torch.ones(1))
    freed_s = max(0.0, left_s - began[0]) if has_group else 0.0
    return Timing(freed_s, time.monotonic() - began[0], time.process_time() - began[1], not has_group)
