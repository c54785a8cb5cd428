"""Test blocks that a process can enter only once: a new process takes over the state of the old one."""

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointless.observability.telemetry.event_names import Rung
from checkpointless.system.temp_folder import SHARED_MEMORY
from tests.ranks import agent_job
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Attempt, Job, Trainings, TrainingsOf
from tests.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

SCRIPT = str(SCRIPTS / "once.py")
STEPS = 6
EXCEPTION = "exception@forward:rank=1,step=3"
Train = Callable[..., Job]


def handed_over_in(log: str) -> Path:
    """Return the folder in shared memory of a rank that has begun."""
    return Path(log.partition("hands over in ")[2].split()[0])


def require_clean(job: Job, *ranks: int) -> None:
    assert not any(handed_over_in(job.log(rank)).exists() for rank in ranks), "something is left in shared memory"


@pytest.fixture
def train(trainings_of: TrainingsOf) -> Train:
    """Return a function that trains in a layout through faults, to the same end as without, and loses nothing."""

    def through_faults(layout: str, once: str, *more: str, faults: tuple[str, ...] = (EXCEPTION,)) -> Job:
        # The processes of tests have a start method.
        own: dict[str, Any] = {"fork_here": False} if once == "spawn" else {}
        job = trainings_of(SCRIPT, **own).rough(2, (str(STEPS), layout, once), *faults, more=more)
        require_clean(job, 0)
        assert {each.steps_lost for each in job.incidents} <= {0, None}, job.story()
        return job

    return through_faults


@pytest.mark.parametrize(
    ("layout", "once", "call"),
    [
        pytest.param("ddp", "spawn", 'multiprocessing.set_start_method("spawn")', marks=pytest.mark.long),
        ("sharded", "registry", 'register("model")'),
    ],
)
def test_every_rank_hands_its_state_to_a_new_process(train: Train, layout: str, once: str, call: str) -> None:
    """At the first fault the entry in place fails, which tells; at the second one nobody tries it."""
    faults = (EXCEPTION, "exception@between:rank=0,step=4")
    job = train(layout, once, faults=faults)
    assert [each.rung for each in job.incidents] == [Rung.IN_PROCESS, Rung.OWN_STATE, Rung.OWN_STATE], job.story()
    said = "\n".join(job.said)
    assert f"({call}) in front of the function that HPWrapper wraps" in said
    assert said.count("could not enter its block again") == 1
    assert said.count("(new process, own state); nothing was lost") == 2, said
    assert job.told().count("found 600 in 700") == 4, job.told()


@pytest.mark.long  # above the two are on one node
def test_ranks_of_two_nodes_hand_their_states_over(trainings: Trainings) -> None:
    """No two ranks hold the same, so that nothing else could restore them."""
    args = (str(STEPS), "sharded", "registry")
    job = trainings.run(2, args, EXCEPTION, "exception@between:rank=2,step=4", nnodes=2)
    job.assert_same(trainings.calm(4, *args).steps)
    assert [each.rung for each in job.incidents] == [Rung.IN_PROCESS, Rung.OWN_STATE, Rung.OWN_STATE], job.story()
    require_clean(job, 0, 2)


def test_new_processes_at_every_fault_if_they_are_asked_for(train: Train) -> None:
    job = train("ddp", "process", faults=(EXCEPTION, "sigkill@optimizer:rank=0,step=5"))
    assert [each.rung for each in job.incidents] == [Rung.OWN_STATE, Rung.PROCESS], job.story()
    assert job.incidents[-1].sources == (1,), "a replica fills the one that was killed"
    assert job.told().count("found 600 in 700") == 3, job.told()


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
def test_a_replica_fills_a_rank_whose_state_does_not_arrive(train: Train, once: str, word: str, line: str) -> None:
    job = train("ddp", once, word)
    assert job.incidents[-1].sources == (0,), job.story()
    assert line in job.told(), job.story()


@pytest.mark.long  # above a state that finds no room
def test_without_room_a_process_stays_where_new_ones_are_only_asked_for(train: Train) -> None:
    job = train("sharded", "process", "full")
    assert "rank 1 stays in its process: its state could not be handed over" in job.told(), job.story()
    assert job.incidents[-1].respawned == (0,), job.story()


def test_without_a_replica_the_job_ends_with_the_reason(attempt: Attempt) -> None:
    job = attempt(2, args=(str(STEPS), "sharded", "process", "damaged"), faults=(EXCEPTION,), code=1)
    require_clean(job, 0)
    assert "no living rank holds the shard of rank 1" in job.said[-1]


def test_a_block_that_fails_in_a_new_process_too_ends_the_job(attempt: Attempt) -> None:
    job = attempt(2, args=(str(STEPS), "ddp", "always"), faults=(EXCEPTION,), code=1)
    require_clean(job, 0)
    assert (
        "ValueError: this never ends well again, 3 times in a row with no step committed in between" in job.told()
    )


def test_nothing_stays_behind_an_agent_that_is_killed(tmp_path: Path) -> None:
    job = agent_job.Job(tmp_path, "once.py", str(STEPS), "ddp", "process", "wait", nproc=2, faults=(EXCEPTION,))
    wait_until(lambda: "found 600" in job.log(0) + job.log(1))
    folder = handed_over_in(job.log(0))
    assert folder in SHARED_MEMORY.iterdir()
    job.process.send_signal(signal.SIGSTOP)  # it will not read that a rank has ended
    (rank := job.zygote().children()[0]).kill()
    rank.wait(60)
    job.process.send_signal(signal.SIGKILL)
    wait_until(lambda: not folder.exists())


@pytest.mark.long  # test_contract.py has the script, the tests above new processes
def test_lightning_gets_back_what_its_parts_have(trainings_of: TrainingsOf) -> None:
    """The second rank to go is killed in an update that the other one has made."""
    lightning, args = trainings_of(str(SCRIPTS / "lightning_fit.py")), ("24", "ddp", "keeps-clip", "validation")
    faults = ("exception@backward:rank=1,step=8", "sigkill@optimizer:rank=0,step=11")
    calm, rough = lightning.calm(2, *args), lightning.rough(2, args, *faults, more=("once",))
    means, results = (set(re.findall("RESULT .*", job.told())) for job in (calm, rough))
    assert results == means
    assert "(new process, own state); nothing was lost" in rough.told()
