"""The state of a rank on its way from a process to its successor, in the memory of the node.

A process that cannot enter its block again writes a part file (as of local checkpoints) into shared memory of this
user. The successor compares every digest, and holds the state as if it had lived through the fault. The file stays
until training goes on, for a further process. If the successor is on another node, the process waits and sends the
part to whoever proves that it knows a secret, which the coordinator has passed on.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from checkpointless.inprocess.exceptions import line_of
from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.observability.telemetry.wording import size
from checkpointless.replication.parts import Content, Part, PartError, PartId, SaveId
from checkpointless.replication.store import DirectoryStore
from checkpointless.state.held_state import HeldState
from checkpointless.state.journal import StepJournal
from checkpointless.state.port import SnapshotPoint, StepSnapshot
from checkpointless.state.rank_local.state import Carried, RankLocalState
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.tensor_memory import own_device
from checkpointless.system.environment import (
    HANDOVER_ENV,
    LOCAL_WORLD_SIZE_ENV,
    SOURCE_ENV,
    own_rank,
    own_world_size,
)

logger = logging.getLogger(__name__)


_CONTROL_GROUP = Path("/sys/fs/cgroup")  # as a container sees its own, in version 2
_NO_FOLDER = "the agent has no folder in shared memory for it"


def hand_over(leaves: Snapshot | None, own: RankLocalState, high_water: int) -> tuple[int, str]:
    """Write what this process leaves into the node's memory; return its bytes, and why it failed ("": not)."""
    root = _root()
    if root is None:
        return 0, _NO_FOLDER
    if leaves is None:
        return sum(path.stat().st_size for path in root.glob("*")), ""
    held = leaves.held
    try:
        clear()
        content, problem = _content(leaves, own, high_water)
        problem = problem or _lacking_room(content.nbytes, root.parent)
        if problem:
            return 0, problem
        DirectoryStore(root).write(_sealed(held, content), own_rank())
    except _ERRORS as error:
        clear()
        return 0, line_of(error)
    return content.nbytes, ""


def offer(leaves: Snapshot | None, own: RankLocalState, high_water: int, address: str) -> tuple[str, str]:
    """Offer the same at ``address`` to a successor on another node; return what that needs, and why not."""
    global _offering
    clear()
    if leaves is None:
        return "", ""
    try:
        content, problem = _content(leaves, own, high_water)
        if problem:
            return "", problem
        _offering = _Offering(_sealed(leaves.held, content), address)
    except _ERRORS as error:
        return "", line_of(error)
    return _offering.source, ""


def _content(leaves: Snapshot, own: RankLocalState, high_water: int) -> tuple[Content, str]:
    """Return the whole state of this rank, and why it is of no use ("": it is of a step). See :func:`hand_over`."""
    held = leaves.held
    if held.commit.ready and held.commit.committed == high_water - 1:
        held.redo(high_water)
    if held.commit.torn:
        return Content(b"", ()), held.given_up or "an update failed half-way"
    streams = [(step, states) for (step, _), states in own.streams.states.items()]
    return replace(leaves, own=Carried(streams, own.streams.data_start())).content(), ""


def _sealed(held: HeldState, content: Content) -> Part:
    name = PartId(SaveId(max(held.commit.committed, 0), secrets.token_hex(12)), own_rank())
    return Part.sealed(name, own_world_size(), content)


def take_over(own: RankLocalState) -> Snapshot | None:
    """Return what the process before this one has left; None, with a warning if it is damaged: it left nothing."""
    root = _root()
    is_here = root is not None and root.is_dir()
    try:
        part = _left_in(root) if root is not None and is_here else _fetched()
        if part is None:
            return None
        found = Snapshot.of(part.content)
        own.streams.forget()
        found.own.keep_in(own)
        return found
    except (OSError, ValueError) as error:
        how = "handed over" if is_here else "offers"
        logger.error("what the process before this one %s cannot be used: %s", how, line_of(error))
        return None


def _left_in(root: Path) -> Part:
    shelf = DirectoryStore(root).shelf(own_world_size())
    for save in sorted(shelf, reverse=True):
        for file in shelf[save].get(own_rank(), ()):
            return file.read()
    raise PartError("it was not written to its end")


def clear() -> None:
    """Remove what was handed over or offered, because training goes on with it or without it."""
    global _offering
    if _offering is not None:
        _offering.close()
        _offering = None
    root = _root()
    if root is not None:
        shutil.rmtree(root, ignore_errors=True)


# --- Over the network: the successor is on another node -----------------------------------------------------------

_NONCE = 32
_PROOF_TIMEOUT_S = 5.0
_TRANSFER_TIMEOUT_S = 60.0  # for each read from the other side, and each write to it
_FETCH_LIMIT_S, _RETRY_S = 90.0, 0.5
_CONNECTIONS = 4  # that are served at a time
_ERRORS = (OSError, MemoryError, RuntimeError, ValueError, TypeError)


class _Offering:
    """Sends a part to whoever knows the secret in ``source``, as often as it is asked, until it is closed."""

    def __init__(self, part: Part, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._part, self._secret = part, secrets.token_bytes(_NONCE)
        self._listener = socket.create_server((address, 0), family=family)
        self._is_closed, self._free = False, threading.BoundedSemaphore(_CONNECTIONS)
        self.source = f"{address} {self._listener.getsockname()[1]} {self._secret.hex()}"
        threading.Thread(target=self._serve, name="checkpointless-offering", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it is closed, or this process has no descriptor left
                time.sleep(_RETRY_S)
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            answers = threading.Thread(target=self._answer, args=(connection,), daemon=True)
            answers.start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._send(connection)
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("the state was not sent to a successor: %s", error)
        finally:
            self._free.release()

    def _send(self, connection: socket.socket) -> None:
        connection.settimeout(_PROOF_TIMEOUT_S)
        mine, cut = secrets.token_bytes(_NONCE), threading.Timer(_PROOF_TIMEOUT_S, _shut, (connection,))
        cut.daemon = True
        with connection.makefile("rwb") as stream:
            cut.start()
            try:
                stream.write(mine)
                stream.flush()
                theirs, proof = stream.read(_NONCE), stream.read(_NONCE)
            finally:
                cut.cancel()
            if not hmac.compare_digest(proof, _mac(self._secret, b"fetch", mine, theirs)):
                raise ValueError("who asks for it does not know the secret")
            connection.settimeout(_TRANSFER_TIMEOUT_S)
            stream.write(_mac(self._secret, b"offer", theirs, mine))
            self._part.write_to(stream)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


_offering: _Offering | None = None


def _fetched() -> Part | None:
    """Return what the process before this one offers on another node; None if it offers nothing."""
    source = os.environ.pop(SOURCE_ENV, "")
    if not source:
        return None
    part = _received(*source.split())
    if (part.id.part, part.world_size) != (own_rank(), own_world_size()):
        raise PartError(f"it is {part.id.words}, of {part.world_size} ranks")
    return part


def _received(address: str, port: str, secret: str) -> Part:
    """Receive the part; connections that break are made again."""
    by_s = time.monotonic() + _FETCH_LIMIT_S
    while True:
        try:
            return _receive(address, port, secret)
        except OSError as error:
            if time.monotonic() >= by_s or isinstance(error, ConnectionRefusedError):  # nobody offers it any more
                raise
            logger.warning("the state that is offered at %s:%s is asked for again: %s", address, port, error)
            time.sleep(_RETRY_S)


def _receive(address: str, port: str, secret: str) -> Part:
    with socket.create_connection((address, int(port)), timeout=_PROOF_TIMEOUT_S) as connection:
        mine, key = secrets.token_bytes(_NONCE), bytes.fromhex(secret)
        connection.settimeout(_TRANSFER_TIMEOUT_S)  # it may be busy with another process, or with a stranger
        with connection.makefile("rwb") as stream:
            theirs = stream.read(_NONCE)
            if len(theirs) < _NONCE:
                raise ConnectionResetError("it closed the connection")
            stream.write(mine + _mac(key, b"fetch", theirs, mine))
            stream.flush()
            if not hmac.compare_digest(stream.read(_NONCE), _mac(key, b"offer", mine, theirs)):
                raise PartError(f"what listens at {address}:{port} does not know the secret")
            return Part.read_from(stream, None, f"the part from {address}:{port}")


def _mac(secret: bytes, *parts: bytes) -> bytes:
    return hmac.new(secret, b"".join(parts), hashlib.sha256).digest()


def _root() -> Path | None:
    folder = os.environ.get(HANDOVER_ENV)
    return Path(folder) / f"rank-{own_rank()}" if folder else None


def _lacking_room(nbytes: int, folder: Path) -> str:
    """Return why ``folder`` has no room for so many bytes of each rank of the node; "" if it has."""
    about, ranks = os.statvfs(folder), int(os.environ.get(LOCAL_WORLD_SIZE_ENV, "1"))
    free = min(about.f_bavail * about.f_frsize, _free_host_memory())
    if nbytes * ranks <= free:
        return ""
    return f"{size(nbytes * ranks)} are needed in {folder.parent} for the ranks of this node, {size(free)} are free"


# --- The whole state of one rank as plain bytes and tensors, which tiers keep, too --------------------------------

#: The moment after a step at which copies are made: the first one, so that a finished step is soon copied.
COPIED_AT = SnapshotPoint.COMMITTED
#: Saves that were not finished when a step was made: the step, and what the save of each was.
Saves = Sequence[tuple[int, int, int, bool]]


@dataclass(frozen=True)
class Snapshot:
    """The whole state of one rank; ``begun``: the last fit known to have begun; ``saves``: in the background."""

    held: HeldState
    begun: int = 0
    finished: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    saves: Saves = ()
    own: Carried = field(default_factory=Carried)

    @classmethod
    def taken(cls, journal: StepJournal, own: RankLocalState, step: int, fit: int, offset: int) -> Snapshot | None:
        """Return the state right after the update of ``step``, its tensors as they live; None: no snapshot."""
        moment, streams = journal.snapshots(step).get(COPIED_AT), own.streams.at(step).get(COPIED_AT)
        if moment is None or streams is None:
            return None
        before = own.streams.newest(step - 1)
        known = [(step, streams)] if before is None else [(step - 1, before), (step, streams)]
        held = HeldState(
            CommitState(step, ready=False, torn=False),
            dict(journal.state.essentials()),
            {COPIED_AT: moment},
            fit=fit,
            offset=offset,
            buffers={(step, COPIED_AT): moment.buffers},
        )
        return cls(held, own=Carried(known, own.streams.data_start()))

    def content(self) -> Content:
        """Return the snapshot as plain bytes and tensors, which are the same ones."""
        held = self.held
        objects = {int(stage): moment.objects for stage, moment in held.moments.items()}
        plain = {
            "committed": held.commit.committed,
            "fit": held.fit,
            "offset": held.offset,
            "begun": self.begun,
            "saves": [[*save[:3], False] for save in self.saves],
            "tensors": held.tensors,
            "moments": [[int(stage), dict(moment.buffers)] for stage, moment in held.moments.items()],
            "buffers": [[step, int(stage), dict(each)] for (step, stage), each in held.buffers.items()],
            "digests": held.digests,
            "own": self.own.to_plain(),
        }
        whole = Content.of(plain)
        told, inside = state_tree.split({"moments": objects, "finished": dict(self.finished)})
        structure = state_tree.dumps([whole.structure, told, len(whole.tensors)])
        return Content(structure, (*whole.tensors, *(tensor.detach() for tensor in inside)))

    @classmethod
    def of(cls, content: Content) -> Snapshot:
        """Return what :meth:`content` made, all on the devices where it was; ``ValueError`` if it was not."""
        try:
            structure, told, count = state_tree.loads(content.structure)
            plain = Content(structure, content.tensors[:count]).state(
                lambda tensor, kind: tensor if tensor.dim() else tensor.to(own_device(kind))
            )
            objects = Content(told, content.tensors[count:]).state(lambda tensor, kind: tensor.to(own_device(kind)))
            kept = objects["moments"]
            moments = {SnapshotPoint(at): StepSnapshot(kept[at], each) for at, each in plain["moments"]}
            buffers = {(step, SnapshotPoint(stage)): each for step, stage, each in plain["buffers"]}
            commit = CommitState(plain["committed"], ready=False, torn=False)
            fit = plain["fit"], plain["offset"]
            held = HeldState(commit, plain["tensors"], moments, plain["digests"], None, *fit, buffers)
            saves = tuple((number, step, stage, going_on) for number, step, stage, going_on in plain["saves"])
            return cls(held, plain["begun"], objects["finished"], saves, Carried.from_plain(plain["own"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no state of a rank: {error!r}") from error


def _free_host_memory() -> int:
    """Return how many bytes of host memory can be taken, also within the limit of this container."""
    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError, KeyError):  # no control group, or one without a limit
        limit, used = (int((_CONTROL_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        about = dict(line.split() for line in (_CONTROL_GROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(about["inactive_file"]))
    return free
