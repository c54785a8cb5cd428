"""The variables of torch's groups and of NCCL: which are in force, where each comes from, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from checkpointless.doctor.findings import Family, Finding, Severity
from checkpointless.environment import TORCH_DISTRIBUTED_DEBUG_ENV, TORCH_NCCL_BLOCKING_WAIT_ENV, TORCH_YES
from checkpointless.nccl import SETTINGS, is_torchruns

_PREFIXES = ("TORCH_NCCL_", "NCCL_")
_BY_USER = "this environment"
_BY_DEFAULT = "the default that checkpointless sets"
_BY_TORCHRUN = "torchrun, which checkpointless overrules"


@dataclass(frozen=True)
class _Harm:
    """A value that harms.

    Attributes:
        values: the values, in lower case.
        cost: what happens with it.
    """

    values: tuple[str, ...]
    cost: str


# Besides those of SETTINGS, which are harmful with any value but one.
_HARMFUL: Mapping[str, _Harm] = {
    TORCH_DISTRIBUTED_DEBUG_ENV: _Harm(
        ("detail",),
        "taken for INFO: torch would compare how often all ranks have used a group, and only some do for a fill",
    ),
    TORCH_NCCL_BLOCKING_WAIT_ENV: _Harm(
        TORCH_YES, "the host waits for every collective, and launches nothing meanwhile"
    ),
}


def judge(environ: Mapping[str, str]) -> list[Finding]:
    """Return what the variables of torch and NCCL mean for a recovery.

    Args:
        environ: environment that the ranks will have.
    """
    findings = [_of_setting(name, environ) for name in SETTINGS]
    for name, harm in _HARMFUL.items():
        value = environ.get(name)
        if value is not None:
            findings.append(_harmful(name, value, harm))
    for name in sorted(environ):
        if name.startswith(_PREFIXES) and name not in SETTINGS and name not in _HARMFUL:
            findings.append(_of_other(name, environ))
    return findings


def facts(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that should be the same on all nodes of a job."""
    own = {name: environ[name] for name in (*SETTINGS, *_HARMFUL) if name in environ}
    return {**own, **{name: value for name, value in environ.items() if name.startswith(_PREFIXES)}}


def _of_setting(name: str, environ: Mapping[str, str]) -> Finding:
    setting = SETTINGS[name]
    if name not in environ:
        return Finding(Family.VARIABLES, Severity.OK, f"{name}={setting.value}", _BY_DEFAULT)
    if is_torchruns(name, environ):
        return Finding(Family.VARIABLES, Severity.OK, f"{name}={setting.value}", _BY_TORCHRUN)
    if environ[name] == setting.value:
        return Finding(Family.VARIABLES, Severity.OK, f"{name}={setting.value}", _BY_USER)
    seen = f"{name}={environ[name]}: {setting.otherwise}"
    return Finding(Family.VARIABLES, Severity.WARNING, seen, _BY_USER, f"unset {name}")


def _harmful(name: str, value: str, harm: _Harm) -> Finding:
    if value.lower() not in harm.values:
        return Finding(Family.VARIABLES, Severity.OK, f"{name}={value}", _BY_USER)
    return Finding(Family.VARIABLES, Severity.WARNING, f"{name}={value}: {harm.cost}", _BY_USER, f"unset {name}")


def _of_other(name: str, environ: Mapping[str, str]) -> Finding:
    """Judge a variable that only NCCL reads, or that torch reads by its old name (before torch 2.2)."""
    value, new = environ[name], f"TORCH_{name}"
    if new in _HARMFUL and new not in environ:
        return _harmful(name, value, _HARMFUL[new])
    if new in SETTINGS or new in _HARMFUL:
        seen = f"{name}={value} is an old name: torch reads {new} first"
        todo = f"unset {name}; set {new} if that is what you want"
        return Finding(Family.VARIABLES, Severity.ADVICE, seen, _BY_USER, todo)
    return Finding(Family.VARIABLES, Severity.OK, f"{name}={value}", _BY_USER)
