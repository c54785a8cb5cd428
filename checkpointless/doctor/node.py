"""Examines one node: all families of checks, in the order in which the machine answers them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpointless.agent.ranks.rank_process import Script
from checkpointless.doctor import (
    clock,
    devices,
    forking,
    kernel,
    limits,
    network,
    storage,
    variables,
    versions,
)
from checkpointless.doctor.clock import Clock
from checkpointless.doctor.findings import Family, Finding, Severity, checked
from checkpointless.environment import TMPDIR_ENV

_QUICK_S = 5.0  # for a check that only asks the kernel; a disk that is gone does not answer
_NAMES_S = 20.0  # for names: a resolver tries several servers, each for seconds
QUICK_LIMIT_S = 0.1  # for all checks before a run


@dataclass(frozen=True)
class Question:
    """What a node is examined for.

    Attributes:
        ranks: number of ranks on the node.
        nodes: number of nodes of the job.
        endpoint: host and port of the coordinator; None: not known.
        run_dir: run directory; None: not known.
        cpu: whether the job trains on CPUs although there may be GPUs.
        ask_torch: whether to import torch in a child process, to ask for its NCCL.
        preload: names that the zygote imports.
        script: what the ranks run; None: not known. Without it and ``preload``, imports are not tried.
    """

    ranks: int = 1
    nodes: int = 1
    endpoint: tuple[str, int] | None = None
    run_dir: Path | None = None
    cpu: bool = False
    ask_torch: bool = True
    preload: tuple[str, ...] = ()
    script: Script | None = None


@dataclass(frozen=True)
class Examination:
    """What was found on a node.

    Attributes:
        findings: the findings.
        facts: what should be the same on all nodes of the job, by name.
        clock: the node's clock.
    """

    findings: tuple[Finding, ...]
    facts: Mapping[str, str]
    clock: Clock


def examine(
    question: Question,
    progress: Callable[[str], None],
    environ: Mapping[str, str] | None = None,
) -> Examination:
    """Examine this machine.

    Args:
        question: what it is examined for.
        progress: called with a line for people before and in whatever may take more than two seconds.
        environ: environment that the ranks will have (None: that of this process).
    """
    environ = os.environ if environ is None else environ
    facts: dict[str, str] = variables.facts(environ)
    cuda = ""

    def looked() -> tuple[Finding, ...]:
        nonlocal cuda
        seen = devices.read()
        cuda = seen.cuda
        return seen.findings

    def asked() -> list[Finding]:
        found = versions.read(cuda, question.ask_torch)
        facts.update(versions.facts(found))
        return versions.judge(found)

    findings = checked(Family.DEVICES, looked, devices.SMI_TIMEOUT_S + _QUICK_S)
    if question.ask_torch:
        progress("asking torch for its versions, in a child process")
    findings += checked(Family.VERSIONS, asked, versions.TORCH_TIMEOUT_S + _QUICK_S)
    findings += _of_this_process(question, environ)
    findings += checked(
        Family.NETWORK,
        lambda: network.judge(network.read(question.endpoint, question.nodes), question.nodes),
        _NAMES_S,
    )
    run_dir = question.run_dir
    if run_dir is not None:
        findings += checked(Family.STORAGE, functools.partial(storage.run_directory, run_dir), _QUICK_S)
    findings += _of_imports(question, progress)
    read = Clock()

    def clocks() -> list[Finding]:
        nonlocal read
        read = clock.read(run_dir if run_dir is not None and run_dir.is_dir() else None)
        return clock.judge(read, question.nodes)

    findings += checked(Family.CLOCK, clocks, _QUICK_S)
    return Examination(tuple(findings), {name: value for name, value in facts.items() if value}, read)


def quick(question: Question, environ: Mapping[str, str]) -> list[Finding]:
    """Return the warnings and errors of the checks that take no time: nothing is imported, no disk is waited for.

    Where there is no GPU, the variables of NCCL have no effect and are left out.

    Args:
        question: what the node is examined for.
        environ: environment that the ranks will have.
    """

    def look() -> list[Finding]:
        found = [] if question.cpu or not versions.has_driver() else variables.judge(environ)
        found += storage.shared_memory() + storage.temporary_files(environ.get(TMPDIR_ENV))
        return [*found, *_limits(question), *kernel.judge(kernel.read())]

    found = checked(Family.NODES, look, QUICK_LIMIT_S)
    return [each for each in found if each.is_to_change and each.family is not Family.NODES]


def _of_this_process(question: Question, environ: Mapping[str, str]) -> list[Finding]:
    temporary = functools.partial(storage.temporary_files, environ.get(TMPDIR_ENV))
    return [
        *checked(Family.VARIABLES, lambda: variables.judge(environ), _QUICK_S),
        *checked(Family.STORAGE, storage.shared_memory, _QUICK_S),
        *checked(Family.STORAGE, temporary, _QUICK_S),
        *checked(Family.LIMITS, lambda: _limits(question), _QUICK_S),
        *checked(Family.KERNEL, lambda: kernel.judge(kernel.read()), _QUICK_S),
    ]


def _limits(question: Question) -> list[Finding]:
    return limits.judge(limits.read(versions.has_driver() and not question.cpu), question.ranks)


def _of_imports(question: Question, progress: Callable[[str], None]) -> list[Finding]:
    if not question.preload and question.script is None:
        seen = "imports were not tried: --script or --preload says what a zygote would import"
        return [Finding(Family.FORKING, Severity.OK, seen)]
    progress("importing in a child process what a zygote would (NeMo: 10 to 40 s)")

    def tried() -> list[Finding]:
        trial = forking.read(
            question.preload, question.script, ranks=question.ranks, cpu=question.cpu, progress=progress
        )
        return forking.judge(trial)

    return checked(Family.FORKING, tried, forking.TIMEOUT_S + _QUICK_S)
