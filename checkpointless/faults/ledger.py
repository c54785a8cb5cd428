"""The ledger of the faults that have been caused, which survives the process deaths that they cause."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from checkpointless.faults.spec import FaultSpec

logger = logging.getLogger(__name__)

FAULTS_DIR = "faults"

# Claims without a run directory. They outlive a restart of the block in this process, and nothing more.
_in_memory: Counter[tuple[int, str]] = Counter()


class FaultLedger:
    """Hands out each fault ``times`` times over all processes of a run directory, where each claim is a file."""

    def __init__(self, run_dir: Path | None) -> None:
        self.directory = None if run_dir is None else run_dir / FAULTS_DIR

    def is_spent(self, index: int, spec: FaultSpec) -> bool:
        """Return whether the fault has been caused as often as it is to be."""
        if self.directory is None:
            return _in_memory[index, str(spec)] >= spec.times
        return all(path.exists() for path in self._claims(index, spec))

    def claim(self, index: int, spec: FaultSpec, **about: Any) -> bool:
        """Return whether the fault is to be caused once more; if so, count it, with facts ``about`` it."""
        if self.directory is None:
            key = (index, str(spec))
            if _in_memory[key] >= spec.times:
                return False
            _in_memory[key] += 1
            return True
        self.directory.mkdir(parents=True, exist_ok=True)
        claim = json.dumps({"spec": spec.text or str(spec), "pid": os.getpid(), **about}).encode()
        return any(_create(path, claim) for path in self._claims(index, spec))

    def withdraw(self, index: int, spec: FaultSpec) -> None:
        """Take this process's newest claim back: the fault was interrupted before it happened."""
        if self.directory is None:
            _in_memory[index, str(spec)] -= 1
            return
        mine = [path for path in self._claims(index, spec) if _claimant(path) == os.getpid()]
        if mine:
            mine[-1].unlink()

    def _claims(self, index: int, spec: FaultSpec) -> list[Path]:
        assert self.directory is not None
        return [self.directory / f"{index}-{n}.json" for n in range(spec.times)]


def fired(run_dir: Path) -> dict[str, int]:
    """Return how often each fault was caused in a run, by the spec's text."""
    counts: Counter[str] = Counter()
    for path in sorted((run_dir / FAULTS_DIR).glob("*.json")):
        try:
            counts[str(json.loads(path.read_bytes())["spec"])] += 1
        except (ValueError, KeyError, TypeError):
            logger.warning("%s was not written to its end and is not counted", path)
    return dict(counts)


def not_fired(specs: Iterable[FaultSpec], run_dir: Path) -> tuple[str, ...]:
    """Return the spec texts of the faults that were certain to happen but did not, or not often enough."""
    wanted: Counter[str] = Counter()
    for spec in specs:
        if spec.prob is None:
            wanted[spec.text or str(spec)] += spec.times
    return tuple(wanted - Counter(fired(run_dir)))


def _claimant(path: Path) -> int | None:
    """Return the process number in a claim; None if there is no such claim."""
    try:
        return int(json.loads(path.read_bytes())["pid"])
    except FileNotFoundError:
        return None


def _create(path: Path, data: bytes) -> bool:
    """Create ``path`` with ``data``, whole or not at all; return False if the file exists already."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(data)
    try:
        os.link(draft, path)
        return True
    except FileExistsError:
        return False
    except BaseException:  # another rank's fault interrupts this one, which is not caused then
        if path.exists() and path.samefile(draft):
            path.unlink()
        raise
    finally:
        draft.unlink()
