"""Records of what each rank computed, step by step, so that two runs can be compared."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from checkpointless.observability.telemetry.events import append_line, read_lines
from checkpointless.observability.telemetry.scribe import scribe
from checkpointless.system.environment import RECORD_STEPS_ENV, YES, own_rank, own_run_dir

STEPS_DIR = "steps"
NO_LOSS = "-"
_WAIT_S = 1.0
_STEPS, _VALIDATIONS, _CHECKPOINTS = "rank-", "validation-rank-", "checkpoints.jsonl"


class StepRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Record of one optimizer step on one rank; None for what the run does not have or did not record."""

    step: int
    loss: str  # as ``float.hex()`` gives it ("-": not known)
    params: str
    fit: int = 1  # the fit of the block that made the step, counted from 1
    buffers: str | None = None
    lr: tuple[str, ...] | None = None  # learning rate of every parameter group, as ``float.hex()`` gives it
    loss_scale: tuple[str, ...] | None = None
    callbacks: dict[str, str] | None = None
    module: str | None = None
    data: str | None = None
    optimizer: str | None = None
    # digest of each value of the rank-local state (plain attributes or declared state) and of the random streams,
    # by name; "" of what is left out, as it is no plain data or too large
    own: dict[str, str] | None = None
    batch: str | None = None
    epoch: int | None = None  # a number that changes with the epoch; not compared
    validated: bool | None = None  # whether a loop used another loader since the step before; not compared


class ValidationRecord(msgspec.Struct, frozen=True):
    """Record of one validation on one rank: its final metrics by name, each as ``float.hex()`` gives it."""

    step: int
    metrics: dict[str, str]
    callbacks: dict[str, str] = {}


class _CheckpointsRecord(msgspec.Struct, frozen=True):
    checkpoints: tuple[tuple[str, ...], ...]


def _exact(loss: float | None) -> str:
    return NO_LOSS if loss is None else float(loss).hex()


class Recording(dict[int, Sequence[StepRecord]]):
    """The steps of a run by rank, as they were written; ``checkpoints`` are the names in each folder at the end."""

    def __init__(
        self,
        steps: Mapping[int, Sequence[StepRecord]],
        validations: Mapping[int, Sequence[ValidationRecord]],
        checkpoints: tuple[tuple[str, ...], ...] | None,
    ) -> None:
        super().__init__(steps)
        self.validations = validations
        self.checkpoints = checkpoints


class StepLog:
    """Appends what a rank computed to ``<run dir>/steps/rank-N.jsonl`` and to files next to it.

    A line has been handed to the kernel when :meth:`record` returns, so it survives the death of the process,
    unless the disk stalls for longer than a second: that must not keep the rank from taking part in a recovery.
    Repeated steps are kept, so that readers can see them.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.rank = rank
        self.path = run_dir / STEPS_DIR / f"{_STEPS}{rank}.jsonl"
        self._validations = self.path.with_name(f"{_VALIDATIONS}{rank}.jsonl")
        self._checkpoints = self.path.with_name(_CHECKPOINTS)
        self._error: OSError | None = None
        self._earlier: dict[int, StepRecord] | None = None  # by step; None: not read yet
        scribe.flush()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.path, self._validations):
            if path.exists():
                _end_torn_line(path)

    @classmethod
    def from_environment(cls) -> StepLog | None:
        """Return the log that ``--record-steps`` requests for this process, or None if it requests none."""
        run_dir = own_run_dir()
        if run_dir is None or os.environ.get(RECORD_STEPS_ENV) != YES:
            return None
        return cls(run_dir, own_rank())

    def record(self, step: int, loss: float | None, params: str, **more: Any) -> None:
        """Append one step; ``OSError`` if a line so far was not written, since holes would prove nothing."""
        self._append(self.path, StepRecord(step, _exact(loss), params, **more))

    def record_validation(self, step: int, metrics: Mapping[str, float], callbacks: Mapping[str, str]) -> None:
        """Append one validation, with the digest of each callback's state after it, by its state key."""
        exact = {name: float(value).hex() for name, value in metrics.items()}
        self._append(self._validations, ValidationRecord(step, exact, dict(callbacks)))

    def record_checkpoints(self, names: Iterable[Iterable[str]]) -> None:
        """Append the names of the checkpoints that exist, on one rank of a job. The last record counts."""
        self._append(self._checkpoints, _CheckpointsRecord(tuple(tuple(sorted(each)) for each in names)))

    def _append(self, path: Path, record: msgspec.Struct) -> None:
        # Not by msgspec's encoder: names of attributes and files may have lone surrogates, which json escapes.
        line = json.dumps(msgspec.to_builtins(record), separators=(",", ":"))
        if scribe.put(functools.partial(self._write, path, line)):
            scribe.flush(_WAIT_S)
        else:
            self._error = OSError(f"{path}: the disk does not answer, and too much waits for it")
        if self._error is not None:
            raise self._error

    def _write(self, path: Path, line: str) -> None:
        try:
            append_line(path, line)
        except OSError as error:
            self._error = error

    def earlier(self, step: int) -> StepRecord | None:
        """Return what was last recorded of ``step`` before this log began to record; None if nothing was."""
        if self._earlier is None:
            scribe.flush()
            self._earlier = {each.step: each for each in read_lines(self.path, StepRecord) if each.step >= step}
        return self._earlier.pop(step, None)

    def last_step(self) -> int | None:
        """Return the highest step that this process or an earlier one of this rank recorded; None without any."""
        scribe.flush()
        return max((record.step for record in read_lines(self.path, StepRecord)), default=None)


def read_steps(run_dir: Path) -> Recording:
    """Read everything that was recorded of a run, repeated steps included; ``FileNotFoundError`` if nothing was."""
    steps = {rank: [*read_lines(path, StepRecord)] for rank, path in _by_rank(run_dir, _STEPS)}
    if not steps:
        raise FileNotFoundError(f"{run_dir} has no recorded steps: was it run with --record-steps?")
    validations = {rank: [*read_lines(path, ValidationRecord)] for rank, path in _by_rank(run_dir, _VALIDATIONS)}
    found = [*read_lines(run_dir / STEPS_DIR / _CHECKPOINTS, _CheckpointsRecord)]
    return Recording(steps, validations, found[-1].checkpoints if found else None)


def _by_rank(run_dir: Path, prefix: str) -> list[tuple[int, Path]]:
    numbers = ((path.stem.removeprefix(prefix), path) for path in (run_dir / STEPS_DIR).glob(f"{prefix}*.jsonl"))
    return sorted((int(number), path) for number, path in numbers if number.isdecimal())


def _end_torn_line(path: Path) -> None:
    """Cut off a last line that its writer did not finish, so that the next line does not continue it."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
