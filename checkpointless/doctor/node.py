"""Examines one node: all families of checks, the quick ones also before each job."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

from checkpointless.doctor import forking, machine, versions
from checkpointless.doctor.findings import Family, Finding, Severity, checked
from checkpointless.launcher.agent.ranks.rank_process import Script

_QUICK_S = 5.0  # for a check that only asks the kernel; a disk that is gone does not answer


def examine(
    *,
    ranks: int,
    run_dir: Path | None,
    cpu: bool,
    preload: tuple[str, ...],
    script: Script | None,
    progress: Callable[[str], None],
) -> list[Finding]:
    """Examine this machine.

    Args:
        ranks: number of ranks on the node.
        run_dir: run directory; None: not known.
        cpu: whether the job trains on CPUs although there may be GPUs.
        preload: names that the fork server imports.
        script: what the ranks run; None: not known. Without it and ``preload``, imports are not tried.
        progress: called with a line for people before whatever may take more than two seconds.
    """
    progress("asking torch for its versions, in a child process")
    long_s = versions.TORCH_TIMEOUT_S + _QUICK_S
    findings = checked(Family.VERSIONS, lambda: versions.judge(versions.read(cpu)), long_s)
    findings += checked(Family.VARIABLES, lambda: machine.variables(os.environ), _QUICK_S)
    findings += checked(Family.STORAGE, lambda: machine.folders(os.environ, run_dir), _QUICK_S)
    findings += checked(Family.LIMITS, lambda: [_descriptors(ranks)], _QUICK_S)
    if not preload and script is None:
        seen = "imports were not tried: --script or --preload says what the fork server would import"
        return [*findings, Finding(Family.FORKING, Severity.OK, seen)]
    progress("importing in a child process what the fork server would (NeMo: 10 to 40 s)")
    return findings + checked(
        Family.FORKING,
        lambda: forking.judge(forking.read(preload, script, ranks=ranks, cpu=cpu)),
        forking.TIMEOUT_S + _QUICK_S,
    )


def quick(ranks: int, cpu: bool, environ: Mapping[str, str]) -> list[Finding]:
    """Return the warnings and errors of the checks that take no time: nothing is imported.

    Where there is no GPU, the variables of NCCL have no effect and are left out.

    Args:
        ranks: number of ranks on the node.
        cpu: whether the job trains on CPUs although there may be GPUs.
        environ: environment that the ranks will have.
    """
    found = [] if cpu or not versions.has_driver() else machine.variables(environ)
    found += [*machine.folders(environ, None), _descriptors(ranks)]
    return [each for each in found if each.is_to_change]


def _descriptors(ranks: int) -> Finding:
    return machine.open_files(*resource.getrlimit(resource.RLIMIT_NOFILE), ranks)
