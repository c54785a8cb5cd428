"""The command ``doctor``: its options and its checks."""

from __future__ import annotations

import argparse
from pathlib import Path

from checkpointless.cli.command import STDOUT, Command, say, write
from checkpointless.cli.values import UsageError, modules, positive

_EPILOG = """\
examples:
  checkpointless doctor                                  this machine
  checkpointless doctor --nproc-per-node 8 --script train.py    can a fork server import this and fork ranks?
  checkpointless doctor --nproc-per-node 8 --preload nemo.collections.llm
  checkpointless doctor --run-dir /shared/runs           can a run be recorded there?
  checkpointless doctor --json - | jq .worst

Exit status: 0 if all is ok or advice, 1 if there is a warning or an error, 2 if an option is wrong.
"""


def _add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor``."""
    add = parser.add_argument
    add("--nproc-per-node", "--nproc_per_node", type=positive, default=1, metavar="N", help="ranks (default: 1)")
    add("--run-dir", type=Path, metavar="D", help="check that a run can be recorded there")
    add("--cpu", action="store_true", help="check for a job on CPUs")
    add(
        "--preload",
        type=modules,
        default=(),
        metavar="MODULE,...",
        help="check these imports of the fork server, as for `run`",
    )
    add("--script", metavar="SCRIPT", help="check what the fork server imports for this script")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as with `python -m`")
    add("--json", type=Path, metavar="FILE", help="write JSON (-: to standard output, and nothing else)")


def doctor(options: argparse.Namespace) -> int:
    """Show what to change on this machine.

    Raises:
        UsageError: an option is wrong.
    """
    from checkpointless.doctor import findings
    from checkpointless.doctor.node import examine
    from checkpointless.launcher.agent.ranks.rank_process import Script

    if options.module and options.script is None:
        raise UsageError("-m requires --script")
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
        from checkpointless.cli.tables import show_findings

        show_findings(found)
    return findings.exit_code(found)


COMMAND = Command("doctor", "check what a node lacks for recoveries", _add_doctor_options, doctor, _EPILOG)
