"""Test blocks that a process can enter only once: a new process takes over the state of the old one."""

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointless.observability.report.incidents import IncidentSummary, summarize
from checkpointless.observability.telemetry.event_names import Rung
from checkpointless.observability.telemetry.events import read_events
from checkpointless.observability.telemetry.steps import Recording, read_steps
from checkpointless.system.temp_folder import SHARED_MEMORY
from tests.ranks.agent_job import Ended, Job
from tests.ranks.jobs import assert_same
from tests.ranks.test_agent_nodes import Nodes
from tests.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 6
EXCEPTION = "exception@forward:rank=1,step=3"
Calm = Callable[..., Recording]


def train(run_dir: Path, *args: str, faults: tuple[str, ...] = (), code: int = 0) -> Ended:
    options: dict[str, Any] = (
        {"fork_here": False} if "spawn" in args else {}
    )  # the processes of tests have a start method
    job = Job(run_dir, "once.py", str(STEPS), *args, nproc=2, faults=faults, record_steps=True, **options)
    ended = job.end(code=code)
    assert not handed_over_in(job).exists(), "something is left in shared memory"
    return ended


def handed_over_in(job: Job) -> Path:
    """Return the folder in shared memory of a job whose ranks have begun."""
    return Path(job.log(0).partition("hands over in ")[2].split()[0])


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Return a function for the steps of a job without faults; it makes each job once."""

    @functools.cache
    def steps(layout: str, once: str) -> Recording:
        run_dir = tmp_path_factory.mktemp("calm") / "run"
        train(run_dir, layout, once)
        return read_steps(run_dir)

    return steps


def disturbed(
    calm: Calm, run_dir: Path, *args: str, faults: tuple[str, ...] = (EXCEPTION,)
) -> tuple[Ended, list[IncidentSummary]]:
    job = train(run_dir, *args, faults=faults)
    assert_same(calm(*args[:2]), read_steps(run_dir), story=job.err)
    incidents = summarize(read_events(run_dir))
    assert {each.steps_lost for each in incidents} <= {0, None}, job.err
    return job, incidents


@pytest.mark.parametrize(
    ("layout", "once", "call"),
    [
        pytest.param("ddp", "spawn", 'multiprocessing.set_start_method("spawn")', marks=pytest.mark.long),
        ("sharded", "registry", 'register("model")'),
    ],
)
def test_every_rank_hands_its_state_to_a_new_process(
    calm: Calm, tmp_path: Path, layout: str, once: str, call: str
) -> None:
    """At the first fault the entry in place fails, which tells; at the second one nobody tries it."""
    faults = (EXCEPTION, "exception@between:rank=0,step=4")
    job, incidents = disturbed(calm, tmp_path / "run", layout, once, faults=faults)
    assert [each.rung for each in incidents] == [Rung.IN_PROCESS, Rung.OWN_STATE, Rung.OWN_STATE], job.err
    assert f"({call}) in front of the function that HPWrapper wraps" in job.err
    assert job.err.count("could not enter its block again") == 1
    assert job.err.count("(new process, own state); nothing was lost") == 2, job.err
    assert job.out.count("found 600 in 700") == 4, job.out


@pytest.mark.long  # above the two are on one node
def test_ranks_of_two_nodes_hand_their_states_over(tmp_path: Path) -> None:
    """No two ranks hold the same, so that nothing else could restore them."""
    args = (str(STEPS), "sharded", "registry")
    calm = Nodes(tmp_path / "calm", 2, *args, script="once.py", record_steps=True)
    calm.end()
    faults = (EXCEPTION, "exception@between:rank=2,step=4")
    nodes = Nodes(tmp_path / "run", 2, *args, script="once.py", record_steps=True, faults=faults)
    first, _ = nodes.end()
    assert_same(read_steps(calm.run_dir), read_steps(nodes.run_dir), story=first.err)
    rungs = [each.rung for each in summarize(read_events(nodes.run_dir))]
    assert rungs == [Rung.IN_PROCESS, Rung.OWN_STATE, Rung.OWN_STATE], first.err
    assert not any(handed_over_in(agent).exists() for agent in nodes.agents)


def test_new_processes_at_every_fault_if_they_are_asked_for(calm: Calm, tmp_path: Path) -> None:
    faults = (EXCEPTION, "sigkill@optimizer:rank=0,step=5")
    job, incidents = disturbed(calm, tmp_path / "run", "ddp", "process", faults=faults)
    assert [each.rung for each in incidents] == [Rung.OWN_STATE, Rung.PROCESS], job.err
    assert incidents[-1].sources == (1,), "a replica fills the one that was killed"
    assert job.out.count("found 600 in 700") == 3, job.out


@pytest.mark.parametrize(
    ("once", "word", "line"),
    [
        pytest.param(
            "process",
            "damaged",
            "what the process before this one handed over cannot be used",
            marks=pytest.mark.long,
        ),
        ("registry", "full", "rank 1 is replaced: its state could not be handed over"),
    ],
)
def test_a_replica_fills_a_rank_whose_state_does_not_arrive(
    calm: Calm, tmp_path: Path, once: str, word: str, line: str
) -> None:
    job, incidents = disturbed(calm, tmp_path / "run", "ddp", once, word)
    assert incidents[-1].sources == (0,), job.err
    assert line in job.out, job.out


@pytest.mark.long  # above a state that finds no room
def test_without_room_a_process_stays_where_new_ones_are_only_asked_for(calm: Calm, tmp_path: Path) -> None:
    job, incidents = disturbed(calm, tmp_path / "run", "sharded", "process", "full")
    assert "rank 1 stays in its process: its state could not be handed over" in job.out, job.out
    assert incidents[-1].respawned == (0,), job.err


def test_without_a_replica_the_job_ends_with_the_reason(tmp_path: Path) -> None:
    job = train(tmp_path / "run", "sharded", "process", "damaged", faults=(EXCEPTION,), code=1)
    assert "no living rank holds the shard of rank 1" in job.err.splitlines()[-1]


def test_a_block_that_fails_in_a_new_process_too_ends_the_job(tmp_path: Path) -> None:
    job = train(tmp_path / "run", "ddp", "always", faults=(EXCEPTION,), code=1)
    assert "ValueError: this never ends well again, 3 times in a row with no step committed in between" in job.err


def test_nothing_stays_behind_an_agent_that_is_killed(tmp_path: Path) -> None:
    args = str(STEPS), "ddp", "process", "wait"
    job = Job(tmp_path / "run", "once.py", *args, nproc=2, faults=(EXCEPTION,))
    wait_until(lambda: "found 600" in job.log(0) + job.log(1))
    folder = handed_over_in(job)
    assert folder.is_relative_to(SHARED_MEMORY)
    assert folder.exists()
    job.process.send_signal(signal.SIGKILL)
    wait_until(lambda: not folder.exists())


@pytest.mark.long  # test_contract.py has the script, the tests above new processes
def test_lightning_gets_back_what_its_parts_have(tmp_path: Path) -> None:
    """The second rank to go is killed in an update that the other one has made."""

    def fit(name: str, *faults: str) -> tuple[Recording, list[str], Ended]:
        run_dir = tmp_path / name
        args = "lightning_fit.py", "24", "ddp", "keeps-clip", "validation", "once"
        job = Job(run_dir, *args, nproc=2, faults=faults, record_steps=True, fork_here=False).end()
        results = [line.partition("RESULT")[2] for line in job.out.splitlines() if "RESULT" in line]
        return read_steps(run_dir), sorted(set(results)), job

    expected, means, _ = fit("calm")
    found, results, job = fit("rough", "exception@backward:rank=1,step=8", "sigkill@optimizer:rank=0,step=11")
    assert_same(expected, found, story=job.err)
    assert results == means
    assert "(new process, own state); nothing was lost" in job.err
