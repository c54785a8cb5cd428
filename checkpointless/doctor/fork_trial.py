"""A process that imports what a zygote would, and says what stood in the way of a fork.

``python -m checkpointless.doctor.fork_trial`` writes JSON objects, one per line, to a descriptor that it inherits.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from checkpointless.agent.ranks import preload as preloading
from checkpointless.agent.ranks.platforms import install_platform
from checkpointless.agent.ranks.rank_process import Script, die_with_parent
from checkpointless.agent.ranks.zygote import can_fork
from checkpointless.cuda_sign import cuda_sign

_TASKS = Path("/proc/self/task")


class ImportWatch:
    """Looks for signs of CUDA and for threads before and after the body of every module that is imported.

    A sign is put down to the module whose body ran when it came: the one that just ended, or the one that was about
    to import another.

    Attributes:
        preloaded: the name that is being preloaded.
        cuda: how CUDA was initialised, and by which module; None: it was not.
        threads: for each thread of Python, by its identifier, its name and the module that was being imported.
    """

    def __init__(self) -> None:
        self.preloaded = ""
        self.cuda: tuple[str, str] | None = None
        self.threads: dict[int, tuple[str, str]] = {}
        self._running = ["what was preloaded"]
        self._known = {thread.ident for thread in threading.enumerate()}

    def install(self) -> None:
        """Wrap the loaders of Python's own and of compiled modules, for the rest of this process."""
        for loader in (importlib.machinery.SourceFileLoader, importlib.machinery.ExtensionFileLoader):
            setattr(loader, "exec_module", self._watched(loader.exec_module))  # noqa: B010 - mypy: a method

    def look(self, module: str) -> None:
        """Note what is new, and that ``module`` did it."""
        if self.preloaded and not self.preloaded.startswith(module):
            module = f"{module} (which {self.preloaded} needs)"
        if self.cuda is None:
            how = cuda_sign()
            if how:
                self.cuda = how, module
        for thread in threading.enumerate():
            if thread.ident is not None and thread.ident not in self._known:
                self._known.add(thread.ident)
                self.threads[thread.ident] = thread.name, module

    def alive(self) -> list[tuple[str, str]]:
        """Return name and module of each of these threads that has not ended."""
        alive = {thread.ident for thread in threading.enumerate()}
        return [told for ident, told in self.threads.items() if ident in alive]

    def _watched(self, execute: Callable[[Any, ModuleType], None]) -> Callable[[Any, ModuleType], None]:
        def exec_module(loader: Any, module: ModuleType) -> None:
            self.look(self._running[-1])
            self._running.append(module.__name__)
            try:
                execute(loader, module)
            finally:
                self._running.pop()
                self.look(module.__name__)

        return exec_module


class _Failures(logging.Handler):
    """Says why a module could not be imported, in the words of what imports them."""

    def __init__(self, say: Callable[..., None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(failed=record.getMessage())


def main() -> None:
    """Import, fork once, and say what was seen."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--preload", default="")
    parser.add_argument("--platform")
    parser.add_argument("--script", type=Script.from_json)
    options = parser.parse_args()
    die_with_parent(options.parent)
    os.set_inheritable(options.fd, False)

    def say(**fields: Any) -> None:
        os.write(options.fd, (json.dumps(fields) + "\n").encode())

    preloading.logger.addHandler(_Failures(say))
    began_s = time.monotonic()
    names = tuple(name for name in options.preload.split(",") if name)
    if not names and options.script is not None:
        names = preloading.preloads_of(options.script)
    watch = ImportWatch()
    watch.install()
    for number, name in enumerate(names):
        say(importing=name, number=number, of=len(names))
        watch.preloaded = name
        preloading.preload((name,), options.script)
        watch.look(name)
    if options.platform is not None:
        watch.preloaded = ""
        install_platform(options.platform)
        watch.look(f"the platform {options.platform}")
    how, module = watch.cuda or ("", "")
    native = len(list(_TASKS.iterdir())) - threading.active_count()
    say(
        end=True,
        names=names,
        cuda=how,
        by=module,
        can_fork=can_fork(),
        threads=watch.alive(),
        native=native,
        seconds=time.monotonic() - began_s,
    )
    os._exit(0)  # what was imported may take long to shut down


if __name__ == "__main__":
    main()
