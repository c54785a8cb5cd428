"""What went wrong in a rank or a node, and which of several causes explains the others."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, TypeAlias

import msgspec

#: An integer of at most 64 bits: nothing that is said is larger.
Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

#: What can be written as JSON.
Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None

#: What was read from JSON: plain values, lists and dicts, in a shape that only the reader knows.
Parsed: TypeAlias = Any


class CauseKind(Enum):
    """How much a cause explains; a later kind beats an earlier one."""

    PLANNED = "planned"  # a node's ranks move to another node, as somebody has asked for
    VICTIM = "victim"  # an error that says that a peer or the store went away
    EXCEPTION = "exception"
    LOSS = "loss"  # a process ended, hung, or asked to be replaced


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that went wrong."""

    kind: CauseKind
    rank: Int | None  # the rank at fault; None if it is not known
    how: str  # ``exception``, ``exit``, ``hang``, ``replace``, ``planned``, or the name of a signal
    what: str  # one line without the rank, for example "killed by SIGKILL"
    step: Int
    detail: str = ""  # the rest of the line, after the step
    error: str = ""
    message: str = ""
    traceback: str = ""
    who: str = ""  # the name of what is at fault, where that is not a rank

    @property
    def culprit(self) -> int | None:
        """The rank to blame; None if only a victim is known."""
        return None if self.kind is CauseKind.VICTIM else self.rank

    def __str__(self) -> str:
        who = self.who or ("ranks" if self.rank is None else f"rank {self.rank}")
        at = f" at step {self.step}" if self.step >= 0 else ""
        return f"{who} {self.what}{at}" + (f": {self.detail}" if self.detail else "")


def exit_cause(rank: int, code: int, step: int, when: str = "") -> Cause:
    """Return the cause for the end of a process with an exit code, or minus the number of a signal.

    ``when`` says more about the time, where there is no step.
    """
    when = f" {when}" if when else ""
    if code < 0:
        name = signal_name(-code)
        return Cause(CauseKind.LOSS, rank, name, f"killed by {name}{when}", step)
    return Cause(CauseKind.LOSS, rank, "exit", f"exited with code {code}{when}", step)


def exit_code(leaving: SystemExit) -> int:
    """Return the exit code of a process that a script ends by ``sys.exit``: 0 only for nothing and 0, 1 for a text.

    Python takes the last eight bits, so that ``sys.exit(os.system(...))`` of a command that failed is a success.
    """
    code = leaving.code
    if not isinstance(code, int):
        return int(code is not None)
    return code & 0xFF or int(code != 0)


def exception_cause(rank: int, error: str, message: str, traceback: str, step: int, victim: bool) -> Cause:
    """Return the cause for an exception in a rank."""
    line = message.strip().partition("\n")[0][:200]
    kind = CauseKind.VICTIM if victim else CauseKind.EXCEPTION
    return Cause(kind, rank, "exception", f"raised {error}", step, line, error, message, traceback)


def signal_name(number: int) -> str:
    """Return the name of a signal, for example ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def attribute(causes: Sequence[Cause]) -> Cause:
    """Return the cause that explains the others: the first of the strongest kind; there must be one."""
    kinds = list(CauseKind)
    return max(causes, key=lambda cause: kinds.index(cause.kind))  # of equals, max() takes the first
