"""What each node of a job found at its start, as files in the run directory: ``doctor/node-<i>.json``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from checkpointless.doctor.clock import Clock
from checkpointless.doctor.findings import Family, Finding, Severity
from checkpointless.telemetry.wording import printable

FOLDER = "doctor"
_FORMAT = 1
_MOST_BYTES = 2**20
_LONGEST = 400


@dataclass(frozen=True)
class NodeRecord:
    """What one node found.

    Attributes:
        node: number of the node.
        nodes: number of nodes that train.
        spares: number of nodes that wait.
        host: name of the machine.
        at_s: when it was examined, in seconds since the epoch.
        clock: the node's clock.
        facts: what should be the same on all nodes, by name.
        findings: the findings.
        format: version of this form.
    """

    node: int
    nodes: int
    spares: int
    host: str
    at_s: float
    clock: Clock
    facts: dict[str, str]
    findings: tuple[Finding, ...]
    format: int = _FORMAT


@dataclass(frozen=True)
class Records:
    """The records of a run directory.

    Attributes:
        records: those that could be read, by the node's number.
        unreadable: findings about the others.
    """

    records: dict[int, NodeRecord]
    unreadable: tuple[Finding, ...] = ()


def folder_of(run_dir: Path) -> Path:
    """Return the folder with the records of a run."""
    return run_dir / FOLDER


def write(record: NodeRecord, run_dir: Path) -> Path:
    """Write a record, and return its path; nobody ever sees a part of it.

    Raises:
        OSError: it cannot be written.
    """
    folder = folder_of(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"node-{record.node}.json"
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(msgspec.json.encode(record))
    part.replace(path)
    return path


def read(run_dir: Path) -> Records:
    """Read the records of a run.

    Raises:
        OSError: the folder cannot be read.
    """
    records: dict[int, NodeRecord] = {}
    unreadable = []
    for path in sorted(folder_of(run_dir).glob("node-*.json")):
        try:
            with path.open("rb") as file:
                record = msgspec.json.decode(file.read(_MOST_BYTES), type=NodeRecord)
            if record.format != _FORMAT:
                raise ValueError(f"it has format {record.format}, not {_FORMAT}")
            if path.name != f"node-{record.node}.json":
                raise ValueError(f"it is of node {record.node}")
        except (OSError, ValueError) as error:
            seen = printable(f"{path} cannot be read: {error}", _LONGEST)
            todo = "give all nodes the same version of checkpointless"
            unreadable.append(Finding(Family.NODES, Severity.WARNING, seen, str(path), todo))
        else:
            records[record.node] = record
    return Records(records, tuple(unreadable))
