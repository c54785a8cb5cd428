"""Check that a node's ranks go on on a spare, with the bits of an undisturbed run and no step made twice."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointless.observability.report.incidents import IncidentSummary, summarize
from checkpointless.observability.telemetry.event_names import EventName, Rung
from checkpointless.observability.telemetry.events import read_events
from checkpointless.observability.telemetry.steps import Recording, read_steps
from checkpointless.system.environment import TOKEN_ENV
from tests.ranks.agent_job import SCRIPTS, TOKEN, Job
from tests.ranks.job_callbacks import AT_BATCH
from tests.ranks.jobs import RUNNER, Scene, assert_same, run_job
from tests.ranks.nemo_zygote import Zygote
from tests.ranks.test_agent_nodes import Nodes
from tests.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 6
Calm = Callable[[str], Recording]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    @functools.cache
    def steps(layout: str) -> Recording:
        run_dir = tmp_path_factory.mktemp("calm") / "run"
        job = Job(run_dir, "once.py", str(STEPS), layout, nproc=4, record_steps=True)
        job.end()
        return read_steps(run_dir)

    return steps


def start(run_dir: Path, layout: str, **options: Any) -> Nodes:
    """Start 2 nodes of 2 ranks and a spare; the job waits in step 3 until its ranks are to pause."""
    options = {"spares": 1, "record_steps": True, **options}
    return Nodes(run_dir, 2, str(STEPS), layout, "waits", script="once.py", **options)


def begin_of_step_3(nodes: Nodes) -> None:
    wait_until(lambda: len(list((nodes.run_dir / "steps").glob("rank-*.jsonl"))) == 4)


def move(endpoint: str, *options: str, token: str = TOKEN) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "checkpointless", "move", *options, "--rdzv-endpoint", endpoint]
    return subprocess.Popen(command, env={**os.environ, TOKEN_ENV: token}, stderr=subprocess.PIPE, text=True)


def at(nodes: Nodes) -> str:
    return f"127.0.0.1:{nodes.port}"


def incidents(nodes: Nodes) -> list[IncidentSummary]:
    return summarize(read_events(nodes.run_dir))


@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])  # below is hsdp
def test_a_node_moves_and_no_step_is_made_twice(tmp_path: Path, calm: Calm, layout: str) -> None:
    nodes = start(tmp_path, layout)
    begin_of_step_3(nodes)
    asked = move(at(nodes), "--node", "1")
    _, said = asked.communicate(timeout=120)
    ended = nodes.end()
    assert asked.returncode == 0, said
    assert_same(calm(layout), read_steps(tmp_path), STEPS)
    (incident,) = incidents(nodes)
    assert (incident.how, incident.rung, incident.steps_lost) == ("planned", Rung.OWN_STATE, 0)
    (moved,) = nodes.agents[0].events(EventName.MOVED)
    assert moved.fields["node_number"] == 1
    assert "node 1 moves to a spare" in ended[0].err


def test_a_node_whose_agent_gets_sigterm_is_drained(tmp_path: Path, calm: Calm) -> None:
    nodes = start(tmp_path, "fsdp", on_sigterm="drain")
    begin_of_step_3(nodes)
    nodes.agents[1].process.send_signal(signal.SIGTERM)
    ended = nodes.end()
    assert_same(calm("fsdp"), read_steps(tmp_path))
    assert "node 1 is drained" in ended[1].err
    assert "its agent got SIGTERM" in incidents(nodes)[0].cause


@pytest.mark.long  # test_gradient_check.py moves a node, too
def test_the_node_of_a_rank_that_is_slow_is_left(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, "80", "moved", script="paced.py", spares=1, move_stragglers=True)
    ended = nodes.end()
    assert "node 1 moves to a spare (rank 3 is slow)" in ended[0].err
    (incident,) = incidents(nodes)
    assert (incident.how, incident.steps_lost) == ("planned", 0)


def test_without_a_spare_or_the_token_nothing_moves(tmp_path: Path) -> None:
    nodes = start(tmp_path, "ddp", spares=0)
    begin_of_step_3(nodes)
    asked = move(at(nodes), "--rank", "3")
    _, said = asked.communicate(timeout=120)
    assert (asked.returncode, said.count("\n")) == (1, 1)
    assert "node 1 is not moved: no spare is free" in said
    stranger = move(at(nodes), "--node", "1", token="not the secret of this job")
    _, said = stranger.communicate(timeout=120)
    assert stranger.returncode == 2
    assert "does not accept this job's token" in said
    for agent in nodes.agents:
        agent.process.kill()


def test_a_node_that_is_killed_while_it_moves_is_a_lost_node(tmp_path: Path, calm: Calm) -> None:
    nodes = start(tmp_path, "hsdp")
    begin_of_step_3(nodes)
    asked = move(at(nodes), "--node", "1")
    assert asked.stderr is not None
    assert "its successors start" in asked.stderr.readline()
    nodes.kill(1)  # at any stage of the move, or right after it
    asked.communicate(timeout=120)
    nodes.agents[0].end()
    nodes.agents[2].end()
    assert_same(calm("hsdp"), read_steps(tmp_path))


NEMO = (f"trainer.max_steps={STEPS}", "model.config.num_layers=2")


@pytest.mark.nemo
@pytest.mark.parametrize("trainer", [pytest.param("lightning", marks=pytest.mark.long), "nemo"])
def test_a_node_of_a_trainer_moves(nemo_zygote: Zygote, tmp_path: Path, trainer: str) -> None:
    args: tuple[str, ...]
    script, args = RUNNER, NEMO
    waits: tuple[str, ...] = ("callbacks.waits={_target_: tests.ranks.job_callbacks.Waits}",)
    if trainer == "lightning":
        script, args, waits = str(SCRIPTS / "lightning_fit.py"), (str(STEPS), "ddp"), ("waits",)
    calm = run_job(nemo_zygote, tmp_path / "calm", 4, script=script, args=args)
    said: list[str] = []

    def ask(scene: Scene) -> None:
        scene.wait_for_step(AT_BATCH)
        asked = move(scene.endpoint, "--node", "1")
        said.append(asked.communicate(timeout=150)[1])

    settings: dict[str, Any] = {"spares": 1, "meanwhile": ask, "limit_s": 280.0}
    moved = run_job(nemo_zygote, tmp_path / "run", 2, nnodes=2, script=script, args=(*args, *waits), **settings)
    moved.assert_same(calm.steps, STEPS)
    (incident,) = moved.incidents
    assert (incident.how, incident.steps_lost) == ("planned", 0), said
