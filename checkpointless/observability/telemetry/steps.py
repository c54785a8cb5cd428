"""Records of what each rank computed, step by step, so that two runs can be compared."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpointless.observability.telemetry.events import append_line, read_lines
from checkpointless.observability.telemetry.scribe import scribe
from checkpointless.system.environment import RECORD_STEPS_ENV, YES, own_rank, own_run_dir

STEPS_DIR = "steps"
NO_LOSS = "-"
_WAIT_S = 1.0
_STEPS, _VALIDATIONS, _CHECKPOINTS = "rank-", "validation-rank-", "checkpoints.jsonl"


@dataclass(frozen=True)
class StepExtras:
    """What is recorded of a step besides loss and parameters.

    None means that the run does not have the item or did not record it.
    """

    buffers: str | None = None
    lr: tuple[str, ...] | None = None  # learning rate of every parameter group, as ``float.hex()`` gives it
    loss_scale: tuple[str, ...] | None = None
    callbacks: Mapping[str, str] | None = None
    module: str | None = None
    data: str | None = None
    optimizer: str | None = None
    # digest of each value of the rank-local state (plain attributes or declared state) and of the random streams,
    # by name; "" of what is left out, as it is no plain data or too large
    own: Mapping[str, str] | None = None
    batch: str | None = None
    epoch: int | None = None  # a number that changes with the epoch; not compared
    # whether a loop of one's own used another loader since the step before; not compared
    validated: bool | None = None


NO_EXTRAS = StepExtras()


@dataclass(frozen=True)
class StepRecord:
    """Record of one optimizer step on one rank; ``loss`` is as ``float.hex()`` gives it ("-": not known).

    ``fit`` is the fit of the block that made the step, counted from 1. Between two fits, numbers are left out.
    """

    step: int
    loss: str
    params: str
    extras: StepExtras = NO_EXTRAS
    fit: int = 1


@dataclass(frozen=True)
class ValidationRecord:
    """Record of one validation on one rank: its final metrics by name, each as ``float.hex()`` gives it."""

    step: int
    metrics: Mapping[str, str]
    callbacks: Mapping[str, str] = field(default_factory=dict)


def exact_loss(loss: float | None) -> str:
    """Return a loss as it is recorded."""
    return NO_LOSS if loss is None else float(loss).hex()


class Recording(dict[int, Sequence[StepRecord]]):
    """The steps of a run by rank, in the order in which they were written, and what else was recorded.

    ``checkpoints`` are the sorted names of those that each folder held at the end; None if none are kept.
    """

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

    Each line has been handed to the kernel when :meth:`record` returns, so it survives the death of the process,
    unless the disk stalls for longer than a second: that must not keep the rank from taking part in a recovery. A
    respawned rank continues the file. Every line is kept, even if a step is recorded twice, so that readers can see
    that a finished step was repeated.
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

    def record(
        self, step: int, loss: float | None, params: str, extras: StepExtras = NO_EXTRAS, fit: int = 1
    ) -> None:
        """Append one step; raise ``OSError`` if this line or an earlier one could not be written: holes would prove
        nothing.
        """
        known = {name: value for name, value in vars(extras).items() if value is not None}
        later = {"fit": fit} if fit > 1 else {}
        self._append(self.path, {"step": step, "loss": exact_loss(loss), "params": params, **known, **later})

    def record_validation(self, step: int, metrics: Mapping[str, float], callbacks: Mapping[str, str]) -> None:
        """Append one validation, with the digest of each callback's state after it, by its state key."""
        exact = {name: float(value).hex() for name, value in metrics.items()}
        self._append(self._validations, {"step": step, "metrics": exact, "callbacks": dict(callbacks)})

    def record_checkpoints(self, names: Iterable[Iterable[str]]) -> None:
        """Append the names of the checkpoints that exist, on one rank of a job. The last record counts."""
        self._append(self._checkpoints, {"checkpoints": [sorted(each) for each in names]})

    def _append(self, path: Path, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":"))
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
            found = _read(self.path) if self.path.exists() else []
            self._earlier = {record.step: record for record in found if record.step >= step}
        return self._earlier.pop(step, None)

    def last_step(self) -> int | None:
        """Return the highest step that this process or an earlier one of this rank recorded; None without any."""
        scribe.flush()
        if not self.path.exists():
            return None
        return max((record.step for record in _read(self.path)), default=None)


def read_steps(run_dir: Path) -> Recording:
    """Read everything that was recorded of a run, repeated steps included; ``FileNotFoundError`` if nothing was."""
    steps = {rank: _read(path) for rank, path in _by_rank(run_dir, _STEPS)}
    if not steps:
        raise FileNotFoundError(f"{run_dir} has no recorded steps: was it run with --record-steps?")
    validations = {rank: _read_validations(path) for rank, path in _by_rank(run_dir, _VALIDATIONS)}
    return Recording(steps, validations, _read_checkpoints(run_dir / STEPS_DIR / _CHECKPOINTS))


def _by_rank(run_dir: Path, prefix: str) -> list[tuple[int, Path]]:
    numbers = ((path.stem.removeprefix(prefix), path) for path in (run_dir / STEPS_DIR).glob(f"{prefix}*.jsonl"))
    return sorted((int(number), path) for number, path in numbers if number.isdecimal())


def _read(path: Path) -> list[StepRecord]:
    return [
        StepRecord(
            int(record["step"]),
            str(record["loss"]),
            str(record["params"]),
            _extras(record),
            int(record.get("fit", 1)),
        )
        for _, record in read_lines(path)
        if {"step", "loss", "params"} <= record.keys()
    ]


def _extras(record: Mapping[str, Any]) -> StepExtras:
    known: dict[str, Any] = {name: record[name] for name in vars(NO_EXTRAS) if record.get(name) is not None}
    for name in ("lr", "loss_scale"):
        if name in known:
            known[name] = tuple(known[name])
    return StepExtras(**known)


def _read_validations(path: Path) -> list[ValidationRecord]:
    return [
        ValidationRecord(int(record["step"]), record["metrics"], record.get("callbacks", {}))
        for _, record in read_lines(path)
        if {"step", "metrics"} <= record.keys()
    ]


def _read_checkpoints(path: Path) -> tuple[tuple[str, ...], ...] | None:
    found = None
    for _, record in read_lines(path) if path.exists() else ():
        found = record.get("checkpoints", found)
    return None if found is None else tuple(tuple(each) for each in found)


def _end_torn_line(path: Path) -> None:
    """Cut off a last line that its writer did not finish, so that the next line does not continue it."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
