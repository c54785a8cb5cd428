"""What each rank computed, step by step: loss and parameter digest, kept so that two runs can be compared."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpointless.telemetry.events import RUN_DIR_ENV, append_line, read_lines
from checkpointless.telemetry.scribe import scribe

STEPS_DIR = "steps"
RECORD_STEPS_ENV = "CHECKPOINTLESS_RECORD_STEPS"
_WAIT_S = 1.0


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step on one rank.

    Attributes:
        step: optimizer step, counted from 1.
        loss: the loss as ``float.hex()`` gives it, so that it is compared bit by bit.
        params: digest of this rank's parameters after the step.
    """

    step: int
    loss: str
    params: str


class StepLog:
    """Appends a rank's steps to ``<run dir>/steps/rank-N.jsonl``.

    Each line is in the kernel's hands when :meth:`record` returns, so it survives the death of the process, unless
    the disk has stopped for longer than a second: that must not keep the rank from its part in a recovery. A
    respawned rank continues the file. Every line is kept, a step recorded twice too: that a finished step was done
    again is for the reader to see.

    Args:
        run_dir: the run directory.
        rank: the rank that records.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.path = run_dir / STEPS_DIR / f"rank-{rank}.jsonl"
        self._error: OSError | None = None
        scribe.flush()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _end_torn_line(self.path)

    @classmethod
    def from_environment(cls) -> StepLog | None:
        """The log that ``--record-steps`` asks this process for, or None."""
        run_dir = os.environ.get(RUN_DIR_ENV)
        if not run_dir or os.environ.get(RECORD_STEPS_ENV) != "1":
            return None
        return cls(Path(run_dir), int(os.environ.get("RANK", "0")))

    def record(self, step: int, loss: float, params: str) -> None:
        """Append one step.

        Args:
            step: optimizer step, counted from 1.
            loss: its loss on this rank.
            params: digest of this rank's parameters after it.

        Raises:
            OSError: it could not be written, or an earlier one; a record with holes would prove nothing.
        """
        record = {"step": step, "loss": float(loss).hex(), "params": params}
        if scribe.put(functools.partial(self._append, json.dumps(record, separators=(",", ":")))):
            scribe.flush(_WAIT_S)
        else:
            self._error = OSError(f"{self.path}: the disk does not answer, and too much waits for it")
        if self._error is not None:
            raise self._error

    def _append(self, line: str) -> None:
        try:
            append_line(self.path, line)
        except OSError as error:
            self._error = error

    def last_step(self) -> int | None:
        """The highest step recorded so far, by this process or an earlier one of this rank."""
        scribe.flush()
        if not self.path.exists():
            return None
        return max((record.step for record in _read(self.path)), default=None)


def read_steps(run_dir: Path) -> Mapping[int, Sequence[StepRecord]]:
    """All recorded steps by rank, in the order in which they were written, repeated ones included.

    Args:
        run_dir: the run directory.

    Raises:
        FileNotFoundError: nothing was recorded there.
    """
    found: dict[int, list[StepRecord]] = {}
    for path in (run_dir / STEPS_DIR).glob("rank-*.jsonl"):
        number = path.stem.removeprefix("rank-")
        if number.isdecimal():
            found[int(number)] = _read(path)
    if not found:
        raise FileNotFoundError(f"{run_dir} has no recorded steps: was it run with --record-steps?")
    return dict(sorted(found.items()))


def _read(path: Path) -> list[StepRecord]:
    return [
        StepRecord(int(record["step"]), str(record["loss"]), str(record["params"]))
        for _, record in read_lines(path)
        if {"step", "loss", "params"} <= record.keys()
    ]


def _end_torn_line(path: Path) -> None:
    """Cut off a last line that its writer did not finish, so that the next one does not run on from it."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
