"""What torch's flight recorder holds when a generation is aborted, kept for whoever looks for the cause."""

from __future__ import annotations

import functools
import json
import logging
import os
import queue
import threading
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import torch

from checkpointless.environment import FLIGHT_RECORDS_ENV, own_run_dir
from checkpointless.telemetry.scribe import scribe

logger = logging.getLogger(__name__)

FLIGHT_DIR = "flight"
_TAKE_S = 2.0  # torch asks the driver how far each collective is, and a bad device may never answer
# torch has one recorder for the groups of NCCL, and one for those of gloo.
_RECORDERS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
_NO_GROUP = b'"pg_status":{}'


class Records(Enum):
    """Which of the recorded collectives are kept."""

    ACTIVE = "active"  # those that are not complete
    ALL = "all"  # all that torch still has
    NONE = "none"


def keep_records(generation: int, rank: int) -> None:
    """Queue what the flight recorder holds to be written into this process's run directory, if that is wanted.

    This never waits for the disk, nor raises. torch holds the interpreter lock meanwhile: 50 ms for 2,000
    collectives, and on a GPU until the driver has said how far each is. So nothing is kept unless it is asked for.

    Args:
        generation: the generation that is about to be aborted.
        rank: this rank.
    """
    run_dir, wanted = own_run_dir(), _wanted()
    if run_dir is None or wanted is Records.NONE:
        return
    try:
        _keep(run_dir, generation, rank, wanted)
    except RuntimeError as error:  # no thread can be started
        logger.warning("rank %d: torch's flight recorder is not read: %s", rank, error)


def _keep(run_dir: Path, generation: int, rank: int, wanted: Records) -> None:
    taken: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()

    def take() -> None:
        for backend, name in _RECORDERS.items():
            found = _taken(name, only_active=wanted is Records.ACTIVE)
            if found:
                taken.put((backend, found))

    thread = threading.Thread(target=take, name="checkpointless-flight-recorder", daemon=True)
    thread.start()
    thread.join(_TAKE_S)
    if thread.is_alive():
        logger.warning("rank %d: torch's flight recorder does not answer", rank)
    while not taken.empty():
        backend, found = taken.get()
        path = run_dir / FLIGHT_DIR / f"generation-{generation}-rank-{rank}-{backend}.json"
        scribe.put(functools.partial(_write, path, found), chatter=True)


def _wanted() -> Records:
    text = os.environ.get(FLIGHT_RECORDS_ENV, Records.NONE.value)
    try:
        return Records(text)
    except ValueError:
        choice = ", ".join(each.value for each in Records)
        logger.warning("%s is one of %s, not %r: none", FLIGHT_RECORDS_ENV, choice, text)
        return Records.NONE


def _taken(name: str, *, only_active: bool) -> bytes:
    """Return what a recorder holds, as JSON (b"": it knows no group, or this torch has no such recorder)."""
    dump: Callable[..., bytes] | None = getattr(torch._C._distributed_c10d, name, None)
    try:
        if dump is None or _NO_GROUP in dump(includeCollectives=False, onlyActive=True):
            return b""
        found = dump(includeCollectives=True, onlyActive=only_active)
        return _without_retired(found) if only_active else found
    except Exception:  # what it raises depends on the version, and nothing depends on it
        logger.exception("torch's flight recorder cannot be read")
        return b""


def _without_retired(records: bytes) -> bytes:
    """Leave out what is complete: for torch, all collectives of gloo stay active."""
    said = json.loads(records)
    said["entries"] = [entry for entry in said.get("entries", ()) if not entry.get("retired")]
    return json.dumps(said).encode()


def _write(path: Path, found: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)
