"""Provide ranks in about a second: one process imports NeMo (or what it is told), and forks every rank.

    zygote = Zygote()                 # 10 to 40 s for the first worker of a run of tests
    results = zygote.run(4, "tests.ranks.some_module:function", {"steps": 3})

`function(**arguments)` runs in every rank with the environment that torchrun sets and returns a JSON value.
As a script this file is that process. It forks a helper for each connection, which forks the ranks and talks JSON
lines; it ends when there is no connection any more.
"""

import contextlib
import fcntl
import gc
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from pathlib import Path
from typing import IO, Any, NoReturn

from checkpointless.observability.telemetry.scribe import flush_all
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 300.0
_ENDED_BADLY = "ended-badly"
# What the ranks of most scripts import, too, as the agent's preload imports what a script names: a rank that had to
# compile and run all of that would take a fifth longer.
MODULES = (
    "nemo.lightning",
    "nemo.collections.llm",
    "checkpointless.callbacks.external",
    "checkpointless.testing.demo.text",
    "checkpointless.strategies.megatron_strategy",
    "checkpointless.strategies.torch_strategies",
    "tests.ranks.jobs",
    "tabulate",
    # what torch.compile imports when it is called
    "torch._functorch.aot_autograd",
    "torch._inductor.pattern_matcher",
    "torch._dynamo.backends.debugging",
    "torch.distributed.tensor.experimental._func_map",
)


class RankFailure(AssertionError):
    """Ranks failed or did not end in time; the message has the end of their logs."""


class Zygote:
    """Forks ranks on demand from a process that has imported NeMo on the CPU platform.

    All workers of a run of tests find the process in ``folder``, and whoever comes first starts it; with None it is
    this one's own. In the folders of ``path`` it looks for modules first.
    """

    def __init__(
        self, modules: tuple[str, ...] = MODULES, folder: Path | None = None, path: tuple[Path, ...] = ()
    ) -> None:
        folder = folder or Path(tempfile.mkdtemp(prefix="checkpointless-zygote-"))
        address = folder / f"zygote-{zlib.crc32(' '.join(modules).encode()):x}"
        with _locked(address):
            if not address.exists():
                _start(address, modules, path)
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(address))
        self._lines = self._socket.makefile("rw")
        self._helper = self._answer(START_LIMIT_S)["helper"]

    def run(
        self,
        world_size: int,
        function: str,
        arguments: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        limit_s: float = 180.0,
        expendable: tuple[int, ...] = (),
    ) -> list[Any]:
        """Run `function` ("module:name") in `world_size` forked ranks, and return what each returned, by rank.

        Of `expendable` ranks, which may die, that is None then. Raises RankFailure for any other that does not end
        well within `limit_s` seconds.
        """
        request = {"world_size": world_size, "function": function, "arguments": arguments or {}, "env": env or {}}
        request |= {"limit_s": limit_s, "expendable": expendable}
        self._lines.write(json.dumps(request) + "\n")
        self._lines.flush()
        answer = self._answer(limit_s + 10.0)
        if "failure" in answer:
            raise RankFailure(answer["failure"])
        return answer["results"]

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._socket.close()

    def _answer(self, limit_s: float) -> dict[str, Any]:
        ready, _, _ = select.select([self._socket], [], [], limit_s)
        line = self._lines.readline() if ready else ""
        if not line:
            os.killpg(self._helper, signal.SIGKILL)
            raise RankFailure(f"the zygote did not answer within {limit_s:.0f} s")
        return json.loads(line)


def _locked(address: Path, flags: int = fcntl.LOCK_EX) -> IO[str]:
    lock = address.with_suffix(".lock").open("w")
    fcntl.flock(lock, flags)
    return lock


def _start(address: Path, modules: tuple[str, ...], path: tuple[Path, ...]) -> None:
    environment = {
        **os.environ,
        "CHECKPOINTLESS_CPU": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, path), os.environ.get("PYTHONPATH", "")]),
    }
    with subprocess.Popen(
        [sys.executable, __file__, str(address), *modules],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_LIMIT_S)
        if not ready or not process.stdout.readline():
            process.kill()
            raise RankFailure("the zygote did not start")
        process.returncode = 0  # it outlives this object


def _serve(address: Path, modules: list[str]) -> None:
    ready = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import torch

    from checkpointless.integrations.megatron import cpu_platform

    if importlib.util.find_spec("omegaconf") is not None:
        from checkpointless.recipes import runner

        runner.prepare_process()
    else:  # there are no recipes, and no NeMo
        cpu_platform.install()
    for module in (*modules, "torch.distributed"):
        importlib.import_module(module)
    from tests.ranks import light_managers, light_metadata

    light_metadata.install()
    if "nemo" in sys.modules:
        light_managers.install()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        ready.write("ready\n")
        ready.close()
        _fork_helpers(listener, address)


def _fork_helpers(listener: socket.socket, address: Path) -> None:
    """Fork a helper for each connection, until there is none any more."""
    helpers: set[int] = set()
    served = False
    while True:
        if select.select([listener], [], [], 0.2)[0]:
            connection, _ = listener.accept()
            served = True
            if (pid := os.fork()) == 0:
                listener.close()
                _help(connection)
            connection.close()
            helpers.add(pid)
        helpers -= {pid for pid in helpers if os.waitpid(pid, os.WNOHANG)[0]}
        if served and not helpers:
            try:
                with _locked(address, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    if not select.select([listener], [], [], 0)[0]:
                        address.unlink()
                        return
            except BlockingIOError:
                continue  # somebody comes


def _help(connection: socket.socket) -> NoReturn:
    """Run what is asked for, and end with all that is left of it."""
    os.setsid()
    lines = connection.makefile("rw")
    lines.write(json.dumps({"helper": os.getpid()}) + "\n")
    lines.flush()
    with contextlib.suppress(OSError):
        for line in lines:
            lines.write(json.dumps(_run_ranks(json.loads(line))) + "\n")
            lines.flush()
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("this process has killed itself")


def _run_ranks(request: dict[str, Any]) -> dict[str, Any]:
    world_size = request["world_size"]
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="checkpointless-ranks-") as folder:
        pids = {_fork_rank(request, rank, port, Path(folder)): rank for rank in range(world_size)}
        failed = _wait(pids, Path(folder), time.monotonic() + request["limit_s"], request["expendable"])
        if failed:
            logs = {rank: (Path(folder) / f"{rank}.log").read_text(errors="replace")[-3000:] for rank in failed}
            return {"failure": "\n".join(f"--- rank {rank}: {failed[rank]}\n{log}" for rank, log in logs.items())}
        results = [Path(folder) / f"{rank}.json" for rank in range(world_size)]
        return {"results": [json.loads(path.read_text()) if path.exists() else None for path in results]}


def _fork_rank(request: dict[str, Any], rank: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(_torchrun_environment(rank, request["world_size"], port), **request["env"])
        tempfile.tempdir = None  # TMPDIR may be another now
        module, _, name = request["function"].partition(":")
        result = getattr(importlib.import_module(module), name)(**request["arguments"])
        (folder / f"{rank}.json").write_text(json.dumps(result))
        status = 0
        _outlive(folder, request["world_size"])
    except BaseException:
        traceback.print_exc()
    finally:
        flush_all()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _outlive(folder: Path, world_size: int) -> None:
    """Wait until all ranks have ended well, or one has not: a store and connections end with their process."""
    import torch.distributed as dist

    deadline = time.monotonic() + START_LIMIT_S
    while dist.is_initialized() and not (folder / _ENDED_BADLY).exists() and time.monotonic() < deadline:
        if all((folder / f"{rank}.json").exists() for rank in range(world_size)):
            return
        time.sleep(0.01)


def _torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    numbers |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "NODE_RANK": 0, "MASTER_PORT": port}
    texts = {name: str(number) for name, number in numbers.items()}
    return texts | {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}


def _wait(pids: dict[int, int], folder: Path, deadline: float, expendable: list[int]) -> dict[int, str]:
    """Reap the ranks, and return the reason of each failure. The first failure ends the others a second later."""
    failed: dict[int, str] = {}
    waiting = dict(pids)
    while waiting and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid not in waiting:
            time.sleep(0.01)
            continue
        rank = waiting.pop(pid)
        if status:
            (folder / _ENDED_BADLY).touch()
        if status and rank not in expendable:
            failed[rank] = f"exit code {os.waitstatus_to_exitcode(status)}"
            deadline = min(deadline, time.monotonic() + 1.0)
    for pid, rank in waiting.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        failed.setdefault(rank, "killed: still running")
    return failed


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2:])
