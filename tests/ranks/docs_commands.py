"""Carry out commands of the documentation, and look up its names, in a process that has imported NeMo already."""

import contextlib
import io
import os
from dataclasses import replace
from typing import Any


def command_here(argv: list[str], folder: str) -> dict[str, Any]:
    """Carry out a command in ``folder``, in the forked process; a job's ranks are forked from here."""
    from checkpointless import cli
    from checkpointless.launcher.agent import launch as agent
    from checkpointless.launcher.agent.launch_config import LaunchConfig

    launch = agent.launch

    def launch_from_here(config: LaunchConfig, *args: Any, **kwargs: Any) -> int:
        return launch(replace(config, preload=(), fork_here=True, stream_logs=False), *args, **kwargs)

    agent.launch = launch_from_here
    os.chdir(folder)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = cli.main(argv)
        except SystemExit as ended:  # --help
            code = int(ended.code or 0)
    return {"code": code, "out": said.getvalue()}


def unknown_names(names: list[str]) -> list[str]:
    """Return those of ``names`` that nothing of ours has, in the forked process."""
    return [name for name in names if not _is_known(name)]


def _is_known(text: str) -> bool:
    import inspect
    import re
    from importlib import import_module

    found = re.fullmatch(r"(\w+)(?:\.(\w+)|\((\w+)=\))?", text)
    if found is None:
        return False
    name, attribute, parameter = found.groups()
    for part in ("inprocess", "agent", "recovery", "replication.local_checkpoint", "callbacks", "strategies"):
        value = getattr(import_module(f"checkpointless.{part}"), name, None)
        if value is None:
            continue
        if parameter is not None:
            made = vars(value).get("__init__", value) if isinstance(value, type) else value  # not its __new__
            return parameter in inspect.signature(made).parameters
        if attribute is not None and not hasattr(value, attribute):
            sources = [
                inspect.getsource(cls) for cls in value.__mro__ if cls.__module__.startswith("checkpointless")
            ]
            return any(re.search(rf"\bself\.{attribute}\b[^=\n(]* = ", source) for source in sources)
        return True
    return False
