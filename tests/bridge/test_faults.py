"""Test trainings of Megatron-Bridge through faults in every phase, equal to the bit to those without."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import read_events
from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

SCRIPT = str(Path(__file__).parent / "scripts" / "train.py")
PHASES = ("data", "forward", "backward", "sync", "before_optimizer", "optimizer", "after_optimizer", "between")
INCIDENTS = 10
Train = Callable[..., Job]


@pytest.fixture(scope="module")
def train(bridge_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return a function that trains with faults and compares; the undisturbed job is made once for each kind."""
    undisturbed: dict[tuple[str, ...], Job] = {}

    def run(args: tuple[str, ...], *faults: str) -> Job:
        folder = tmp_path_factory.mktemp("bridge")
        job = run_job(bridge_zygote, folder / "run", 4, script=SCRIPT, args=args, faults=faults)
        assert job.code == 0, job.story()
        assert fired(job.run_dir) == {fault: 2 if fault.endswith("times=2") else 1 for fault in faults}
        return job

    def compared(steps: int, layout: str, *faults: str, breaks: str = "") -> Job:
        args = (str(steps), *layout.split())
        if args not in undisturbed:
            undisturbed[args] = run(args)
        job = run((*args, f"break={breaks}") if breaks else args, *faults)
        job.assert_same(undisturbed[args].steps, steps)
        assert logged(job) == logged(undisturbed[args])
        return job

    return compared


def logged(job: Job) -> dict[str, str]:
    """Return what Bridge has logged of each iteration and validation, the last time it did."""
    log = job.log(3)
    steps = re.findall(r"iteration +(\d+)/ +\d+ .*?(learning rate: .*)\n", log)
    validations = re.findall(r"validation loss at (iteration \d+[\w ]*) \| (.*)\n", log)
    assert steps
    return dict(steps + validations)


def faults_in(kind: str) -> list[str]:
    """Return a fault for each phase, every second step, on one rank after the other."""
    return [f"{kind}@{phase}:rank={place % 4},step={2 * place}" for place, phase in enumerate(PHASES, start=1)]


def test_an_exception(train: Train) -> None:
    train(5, "", "exception@backward:rank=1,step=3")


@pytest.mark.parametrize(
    "kind", [pytest.param("exception", marks=pytest.mark.long), "sigkill"], ids=["exception", "sigkill"]
)
@pytest.mark.parametrize("layout", ["", "tp=2"], ids=["dp4", "tp2-dp2"])
def test_every_phase(train: Train, layout: str, kind: str) -> None:
    train(2 * len(PHASES) + 1, f"{layout} evaluate=3", *faults_in(kind))


@pytest.mark.parametrize(
    ("layout", "kill"),
    [
        ("bf16=1 overlap=1", "sigkill@forward:rank=1,step=2"),
        pytest.param("fp16=1 log=3", "sigkill@before_optimizer:rank=1,step=3", marks=pytest.mark.long),
        pytest.param("pp=2", "sigkill@backward:rank=0,step=3", marks=pytest.mark.long),
        pytest.param("instances=1", "sigkill@forward:rank=1,step=2", marks=pytest.mark.long),
        pytest.param("tp=2 bf16=1 overlap=1 batch=16", "sigkill@between:rank=3,step=2", marks=pytest.mark.long),
    ],
    ids=["bf16-overlap", "fp16-skipped-steps", "pp2", "copies-at-a-neighbor", "tp2-accumulation"],
)
def test_precisions_and_layouts(train: Train, layout: str, kill: str) -> None:
    train(8, f"{layout} evaluate=3", kill, "exception@optimizer:rank=0,step=5", "exception@between:rank=2,step=6")


def test_declared_state(train: Train) -> None:
    """What a callback and the forward step count is as without faults, and the loss depends on it."""
    faults = (
        "exception@backward:rank=1,step=2",
        "sigkill@optimizer:rank=3,step=4",
        "exception@between:rank=0,step=5",
    )
    job = train(7, "state=1 evaluate=3", *faults, "exception@between:rank=0,step=5")
    for rank in range(4):
        (said,) = re.findall(r"events: (.*)", job.log(rank))
        assert said.count("start") == said.count("end") == 7, said


@pytest.mark.parametrize("data", ["single", "cyclic", "batch"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_the_position_in_the_data(train: Train, data: str, workers: int) -> None:
    """There are five batches in a pass: the faults come in the second, at its ends, and in the third."""
    faults = (
        "exception@between:rank=0,step=5",
        "sigkill@after_optimizer:rank=1,step=6",
        "exception@backward:rank=2,step=8",
        "sigkill@data:rank=3,step=11",
        "exception@after_optimizer:rank=1,step=12",
    )
    train(14, f"data={data} workers={workers} evaluate=2 log=3", *faults)


@pytest.mark.parametrize("data", ["single", "cyclic"])
def test_a_worker_of_the_data_loader(train: Train, data: str) -> None:
    faults = ("dataloader@data:rank=0,step=3,how=kill", "dataloader@data:rank=2,step=5")
    train(7, f"data={data} workers=1", *faults)


@pytest.mark.parametrize(
    "breaks",
    [
        "eval:exception:2:4",
        "eval:sigkill:1:4",
        pytest.param("end:exception:2:4", marks=pytest.mark.long),
        pytest.param("eval:sigkill:1:6", marks=pytest.mark.long),
        pytest.param("test:exception:3:6", marks=pytest.mark.long),
    ],
)
def test_in_a_validation(train: Train, breaks: str) -> None:
    train(6, "data=cyclic evaluate=2 log=4", breaks=breaks)


@pytest.mark.parametrize("phase", ["init", "recovery", "transfer"])
def test_in_a_recovery(train: Train, phase: str) -> None:
    train(5, "evaluate=3", "sigkill@forward:rank=1,step=3", f"exception@{phase}:rank=3,step=2")


def test_after_many_incidents_nothing_is_left_behind(train: Train) -> None:
    steps = range(2, 2 + 3 * INCIDENTS, 3)  # a rank says what it holds after two steps; one more follows
    phases = (*("data", "forward", "backward", "sync"), "optimizer", "before_optimizer", "after_optimizer", "data")
    faults = [
        f"exception@{phases[index % len(phases)]}:rank={index % 4},step={step}" for index, step in enumerate(steps)
    ]
    job = train(steps[-1] + 3, "tp=2 data=cyclic workers=1", *faults)
    for rank in range(4):
        residues = [
            (event.fields["threads"], event.fields["descriptors"], event.fields["rss_bytes"])
            for event in read_events(job.run_dir)
            if event.rank == rank and event.stage == EventName.SETTLED
        ]
        threads, descriptors, memory = zip(*residues)
        assert len(residues) == INCIDENTS
        assert threads[-1] <= threads[0], f"rank {rank}: threads {threads}"
        assert descriptors[-1] <= descriptors[0], f"rank {rank}: descriptors {descriptors}"
        assert memory[-1] - memory[1] < 64e6, f"rank {rank}: bytes {memory}"


def test_what_cannot_be_carried_through_a_fault_ends_the_job_at_once(bridge_zygote: Zygote, tmp_path: Path) -> None:
    job = run_job(bridge_zygote, tmp_path / "run", 2, script=SCRIPT, args=("3", "data=external"))
    assert job.code == 1
    assert "dataset.dataloader_type: checkpointless does not know the position" in "\n".join(job.said)
    assert not (job.run_dir / "steps").exists()


def test_twice_in_one_step(train: Train) -> None:
    """What is added up to log is kept, although Bridge has not logged between the faults."""
    job = train(5, "log=4", "exception@forward:rank=1,step=4,times=2")
    assert len(job.incidents) == 2
