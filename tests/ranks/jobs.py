"""Run whole jobs under the agent, with the ranks' zygote forked from a process that has imported NeMo."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.faults.spec import parse
from checkpointless.observability.report.incidents import IncidentSummary, summarize
from checkpointless.observability.report.verify import Steps, compare
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import Event, read_events
from checkpointless.observability.telemetry.steps import Recording, read_steps
from tests.ports import free_port
from tests.ranks.agent_job import TOKEN, Coordinator
from tests.ranks.nemo_zygote import Zygote
from tests.ranks.network import INTERFACE, Network, enter
from tests.waiting import wait_until

RUNNER = "checkpointless.recipes.runner"


@dataclass(frozen=True)
class Job:
    code: int
    said: tuple[str, ...]
    run_dir: Path

    @property
    def steps(self) -> Recording:
        return read_steps(self.run_dir)

    @property
    def incidents(self) -> list[IncidentSummary]:
        return summarize(read_events(self.run_dir))

    def events(self, stage: str, edge: str | None = None, rank: int | None = None) -> list[Event]:
        found = [event for event in read_events(self.run_dir) if event.stage == stage]
        return [event for event in found if edge in (None, event.edge) and rank in (None, event.rank)]

    def log(self, rank: int) -> str:
        return (self.run_dir / "logs" / f"rank-{rank}.log").read_text(errors="replace")

    def assert_same(self, steps: Steps, count: int | None = None) -> None:
        """Assert that every step is that of an undisturbed job, to the bit, and if asked how many there are."""
        assert_same(steps, self.steps, count, self.story())

    def assert_done_again(self, steps: Steps, again: set[int]) -> None:
        """Assert that every step is that of an undisturbed job, and that those in ``again`` were made twice."""
        verdict = compare(steps, self.steps)
        assert verdict.difference is None, f"what was done again has other bits: {verdict.sentence}\n{self.story()}"
        assert not verdict.missing, f"{verdict.sentence}\n{self.story()}"
        assert {place.step for place in verdict.repeated} == again, self.story()

    def told(self) -> str:
        """Return all that the agent and the ranks have said."""
        return "\n".join([*self.said, *(path.read_text(errors="replace") for path in self._logs())])

    def story(self) -> str:
        logs = "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-25:])
            for path in self._logs()
        )
        return "\n".join([f"exit code {self.code}", *self.said, logs])

    def _logs(self) -> list[Path]:
        return sorted((self.run_dir / "logs").glob("*"))  # none if the job has not come that far


def assert_same(expected: Steps, found: Steps, count: int | None = None, story: str = "") -> None:
    """Assert that every step is the same, to the bit, and if asked how many there are."""
    verdict = compare(expected, found)
    assert verdict.equal, f"{verdict.sentence}\n{story}"
    assert count is None or verdict.steps == count


Disturb = Callable[..., Job]  # the fixture runs a job with faults and compares it with one without
TrainingsOf = Callable[..., "Trainings"]  # the fixture returns those of a script, with settings
Attempt = Callable[..., Job]  # the fixture runs a job by itself


def run_job(
    zygote: Zygote,
    run_dir: Path,
    nproc: int,
    *,
    nnodes: int = 1,
    faults: tuple[str, ...] = (),
    code: int | None = 0,
    **settings: Any,
) -> Job:
    """Run a job as :func:`run_nodes` does to its end, with that ``code`` (None: with any), and return it.

    In a job that ends well each fault has to happen as often as it says. The words are those of its first agent.
    """
    jobs = run_nodes(zygote, run_dir, nnodes, nproc, faults=faults, **settings)
    first, *others = [job for job in jobs if job is not None]
    for job in (first, *others):
        assert code in (job.code, None), first.story()
    if code == 0:
        assert fired(run_dir) == {fault: parse(fault).times for fault in faults}, first.story()
    return first


class Trainings:
    """Trains with a script and faults, to the same end as without; without, each training only once."""

    def __init__(self, zygote: Zygote, folders: pytest.TempPathFactory, script: str, **settings: Any) -> None:
        self._zygote, self._folders, self._script, self._settings = zygote, folders, script, settings
        self._calm: dict[tuple[int, tuple[str, ...]], Job] = {}

    def run(
        self, ranks: int, args: tuple[str, ...], *faults: str, run_dir: Path | None = None, **settings: Any
    ) -> Job:
        """Train; the job has to end well, and each fault to happen as often as it says."""
        given: Any = {"script": self._script, "args": args, "faults": faults, **self._settings, **settings}
        return run_job(self._zygote, run_dir or self._folders.mktemp("training") / "run", ranks, **given)

    def calm(self, ranks: int, *args: str) -> Job:
        if (ranks, args) not in self._calm:
            self._calm[ranks, args] = self.run(ranks, args)
        return self._calm[ranks, args]

    def rough(
        self,
        ranks: int,
        args: tuple[str, ...],
        *faults: str,
        steps: int | None = None,
        more: tuple[str, ...] = (),
        **settings: Any,
    ) -> Job:
        """Train with faults, and with ``more`` words for the script; every step has to be that of the calm one."""
        job = self.run(ranks, (*args, *more), *faults, **settings)
        job.assert_same(self.calm(ranks, *args).steps, steps)
        return job


#: Where a loop of one's own, and Lightning, let a fault come.
PHASES = ("data", "forward", "backward", "before_optimizer", "optimizer", "after_optimizer", "between")


def faults_in(phases: Sequence[str], kind: str, ranks: int) -> list[str]:
    """Return a fault for each phase, every second step, on one rank after the other."""
    return [f"{kind}@{phase}:rank={place % ranks},step={2 * place}" for place, phase in enumerate(phases, start=1)]


def require_nothing_left(job: Job, rank: int, incidents: int) -> None:
    """Require that a rank that lived through incidents has, two steps after each, no more than after the first."""
    residues = [
        (event.fields["threads"], event.fields["descriptors"], event.fields["rss_bytes"])
        for event in job.events(EventName.SETTLED, rank=rank)
    ]
    threads, descriptors, memory = zip(*residues)
    assert len(residues) == incidents
    assert threads[-1] <= threads[0], f"rank {rank}: threads {threads}"
    assert descriptors[-1] <= descriptors[0], f"rank {rank}: descriptors {descriptors}"
    assert memory[-1] - memory[1] < 64e6, f"rank {rank}: bytes {memory}"


def small(nproc: int, steps: int) -> tuple[str, ...]:
    """Return overrides for few layers and microbatches: most of a step's time goes into their collectives."""
    return (
        f"trainer.max_steps={steps}",
        "model.config.num_layers=2",
        f"data.micro_batch_size={min(4, 16 // nproc)}",
    )


def run_nodes(
    zygote: Zygote,
    run_dir: Path,
    nnodes: int,
    nproc: int,
    *,
    script: str = RUNNER,
    args: tuple[str, ...] = (),
    faults: tuple[str, ...] = (),
    recipe: str = "tiny_gpt_cpu",  # of the runner
    limit_s: float = 180.0,
    spares: int = 0,  # agents that wait to take the place of a lost one
    late: float | None = None,  # one more agent starts so many seconds later, as the last node once more
    lost: tuple[int, ...] = (),  # the nodes that will be killed
    outside: bool = False,  # the coordinator has a process of its own
    network: Network | None = None,  # a host for each agent, and one more for a coordinator outside
    meanwhile: Callable[[Scene], None] | None = None,  # is done to the job while it runs
    tmp: Path | None = None,  # the nodes' folder for temporary files
    **settings: Any,
) -> list[Job | None]:
    """Run a job of several nodes to its end, each under an agent of its own, on this machine.

    The result has what each agent says, by node; None for one that was killed.
    """
    agents = nnodes + spares + (late is not None)
    arguments = _arguments(run_dir, nproc, script, recipe, args, faults) | settings
    hosts: list[str] = []
    if agents > 1:
        address = "127.0.0.1" if network is None else network.address(agents if outside else 0)
        endpoint = f"{address}:{free_port()}"
        arguments |= {"nnodes": nnodes, "spares": spares, "token": TOKEN, "rdzv_endpoint": endpoint}
    if network is not None:
        hosts = [network.name(host) for host in range(agents + 1)]
        arguments["extra_env"] = {"GLOO_SOCKET_IFNAME": INTERFACE, **settings.get("extra_env", {})}
    coordinator = _outside(arguments, hosts[agents] if hosts else None) if outside else None
    with _accompanied(Scene(run_dir, coordinator, network, arguments.get("rdzv_endpoint", "")), meanwhile):
        answers = zygote.run(
            agents,
            "tests.ranks.jobs:launch_here",
            {"settings": arguments, "late": late, "hosts": hosts},
            env={} if tmp is None else {"TMPDIR": str(tmp)},
            limit_s=limit_s,
            expendable=lost,
        )
    return [Job(each["code"], tuple(each["said"]), run_dir) if each is not None else None for each in answers]


def _arguments(
    run_dir: Path, nproc: int, script: str, recipe: str, args: tuple[str, ...], faults: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "nproc_per_node": nproc,
        "script": script,
        "module": script == RUNNER,
        "script_args": [recipe, *args] if script == RUNNER else list(args),
        "run_dir": str(run_dir),
        "faults": list(faults),
        "record_steps": True,
        "heartbeat_timeout_s": 20.0,
    }


def _outside(settings: dict[str, Any], host: str | None) -> Coordinator:
    """Start the coordinator of a job in a process of its own, and on a host of its own if there is one."""
    timeout, within = str(settings.get("node_timeout_s", 10)), ["ip", "netns", "exec", host] if host else []
    options = "--run-dir", settings["run_dir"], "--node-timeout", timeout, "--heartbeat-timeout", "20"
    whose = settings["rdzv_endpoint"], settings["nnodes"], settings["nproc_per_node"]
    return Coordinator(*whose, *options, within=within)


@dataclass(frozen=True)
class Scene:
    run_dir: Path
    coordinator: Coordinator | None
    network: Network | None
    endpoint: str = ""

    def wait_for_step(self, step: int, rank: int = 0, limit_s: float = 180.0) -> None:
        path = self.run_dir / "steps" / f"rank-{rank}.jsonl"
        self.wait_for(lambda: path.exists() and f'"step":{step},' in path.read_text().replace(" ", ""), limit_s)

    def wait_for(self, condition: Callable[[], object], limit_s: float = 180.0) -> None:
        wait_until(condition, limit_s)

    def stages(self, stage: str) -> list[Any]:
        return [event for event in read_events(self.run_dir) if event.stage == stage]


@contextmanager
def _accompanied(scene: Scene, act: Callable[[Scene], None] | None) -> Iterator[None]:
    """Do ``act`` to a job while it runs, and have the coordinator outside end with it."""
    pool = ThreadPoolExecutor(1)
    try:
        acting = pool.submit(act, scene) if act is not None else None
        yield
        if acting is not None:
            acting.result(timeout=20)  # the job is over, and what was to be done to it should be, too
        if scene.coordinator is not None:
            scene.coordinator.end()
    finally:
        pool.shutdown(wait=False)
        if scene.coordinator is not None:
            scene.coordinator.kill()


def launch_here(settings: dict[str, Any], late: float | None, hosts: list[str]) -> dict[str, Any]:
    from checkpointless.launcher.agent.launch import launch
    from checkpointless.launcher.agent.launch_config import LaunchConfig

    node = int(os.environ["RANK"])
    if hosts:
        enter(hosts[node])
    if node == settings.get("nnodes", 1) and late is not None:
        time.sleep(late)
        node -= 1
    settings = {**settings, "node_rank": node}
    said: list[str] = []
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    settings["run_dir"] = Path(settings["run_dir"])
    settings = {"preload": (), "cpu": True, "fork_here": True, "stream_logs": False, **settings}
    code = launch(LaunchConfig(**settings), said.append)
    return {"code": code, "said": said}
