"""Puts the findings of a job's nodes together: what is the same on several, what differs, which are missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from checkpointless.doctor import clock
from checkpointless.doctor.clock import Clock
from checkpointless.doctor.findings import Family, Finding, Severity
from checkpointless.doctor.records import NodeRecord, Records
from checkpointless.nccl import SETTINGS
from checkpointless.telemetry.wording import numbered, plural

_ABSENT = "not set"
_LONGEST = 60  # characters of a value


def merged(found: Records, here: Clock | None = None, host: str = "") -> list[Finding]:
    """Return the findings of a job.

    Args:
        found: the records of its nodes.
        here: clock of this machine; None: not compared.
        host: name of this machine.
    """
    records = found.records
    findings = list(found.unreadable)
    findings += _missing(records)
    findings += _together(records)
    findings += _differences(records)
    findings += clock.judge_apart({node: record.clock for node, record in records.items()})
    if here is not None:
        for node, record in records.items():
            if record.host == host:
                findings += [replace(each, nodes=(node,)) for each in clock.judge_step(record.clock, here)]
    return findings


def _missing(records: Mapping[int, NodeRecord]) -> list[Finding]:
    if not records:
        return []
    wanted = range(max(record.nodes for record in records.values()))
    there = f"{plural(len(records), 'node')} left findings"
    missing = [node for node in wanted if node not in records]
    if not missing:
        return [Finding(Family.NODES, Severity.OK, there, "the run directory")]
    seen = f"{there}; {numbered('node', missing)} did not"
    todo = "give all nodes one shared --run-dir, or run `checkpointless doctor` on those nodes"
    return [Finding(Family.NODES, Severity.WARNING, seen, "the run directory", todo, tuple(missing))]


def _together(records: Mapping[int, NodeRecord]) -> list[Finding]:
    """Return each finding once, with all nodes that it was seen on."""
    nodes: dict[Finding, list[int]] = defaultdict(list)
    for node in sorted(records):
        for each in records[node].findings:
            nodes[replace(each, nodes=())].append(node)
    return [replace(each, nodes=tuple(seen_on)) for each, seen_on in nodes.items()]


def _differences(records: Mapping[int, NodeRecord]) -> list[Finding]:
    """Return what should be the same on all nodes and is not.

    Versions and the variables that a recovery needs are warnings. The other variables of NCCL may name devices that
    differ from node to node, so they are advice.
    """
    findings = []
    names = sorted({name for record in records.values() for name in record.facts})
    for name in names:
        values: dict[str, list[int]] = defaultdict(list)
        for node, record in records.items():
            values[record.facts.get(name, _ABSENT)].append(node)
        if len(values) < 2:
            continue
        of_nccl = name.startswith(("NCCL_", "TORCH_")) and name not in SETTINGS
        parts = (
            f"{value[:_LONGEST]} on {numbered('node', nodes)}" for value, nodes in sorted(values.items(), key=_most)
        )
        todo = f"give {name} the same value on all nodes" if name.isupper() else "start all nodes from one image"
        severity = Severity.ADVICE if of_nccl else Severity.WARNING
        findings.append(
            Finding(Family.NODES, severity, f"{name} differs: {'; '.join(parts)}", "findings of all nodes", todo)
        )
    return findings


def _most(item: tuple[str, list[int]]) -> tuple[int, list[int]]:
    return -len(item[1]), item[1]
