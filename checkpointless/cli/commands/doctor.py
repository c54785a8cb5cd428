"""The command ``doctor``: its options, and what it looks at."""

from __future__ import annotations

import argparse
from pathlib import Path

from checkpointless.cli.command import Command
from checkpointless.cli.output import STDOUT, say, write
from checkpointless.cli.values import UsageError, modules, positive

_EPILOG = """\
examples:
  checkpointless doctor                                  this machine
  checkpointless doctor --nproc-per-node 8 --script train.py    may a fork server that imports this fork ranks?
  checkpointless doctor --nproc-per-node 8 --preload nemo.collections.llm
  checkpointless doctor --run-dir /shared/runs           can a run be recorded there?
  checkpointless doctor --json - | jq .worst

Exit status: 0 if all is ok or advice, 1 if there is a warning or an error, 2 if it cannot be looked at as asked.
"""


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor``."""
    add = parser.add_argument
    add("--nproc-per-node", "--nproc_per_node", type=positive, default=1, metavar="N", help="ranks (default: 1)")
    add("--run-dir", type=Path, metavar="D", help="can a run be recorded there?")
    add("--cpu", action="store_true", help="the job trains on this machine's CPUs")
    add(
        "--preload",
        type=modules,
        default=(),
        metavar="MODULE,...",
        help="import these in a child process, as for `run`",
    )
    add("--script", metavar="SCRIPT", help="import what this script imports from installed packages, as for `run`")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as with `python -m`")
    add("--json", type=Path, metavar="FILE", help="write it as JSON (-: to standard output, and nothing else)")


def doctor(options: argparse.Namespace) -> int:
    """Show what has to be changed on this machine.

    Raises:
        UsageError: it cannot be looked at as asked.
    """
    from checkpointless.doctor import findings
    from checkpointless.doctor.node import examine
    from checkpointless.launcher.agent.ranks.rank_process import Script

    if options.module and options.script is None:
        raise UsageError("-m says that --script names a module: add --script")
    if options.script is not None and not options.module and not Path(options.script).is_file():
        raise UsageError(f"there is no script {options.script!r}")
    if options.run_dir is not None and options.run_dir.exists() and not options.run_dir.is_dir():
        raise UsageError(f"run directory {options.run_dir} is a file: name another")
    found = examine(
        ranks=options.nproc_per_node,
        run_dir=options.run_dir,
        cpu=options.cpu,
        preload=options.preload,
        script=None if options.script is None else Script(options.script, (), options.module),
        progress=say,
    )
    if options.json is not None:
        write(options.json, findings.as_json(found) + "\n")
    if options.json != STDOUT:
        from checkpointless.cli.findings_page import show

        show(found)
    return findings.exit_code(found)


COMMAND = Command("doctor", "say what a node lacks for recoveries", add_doctor_options, doctor, _EPILOG)
