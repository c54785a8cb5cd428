"""Test Lightning's own strategies with recovery: DDP, HSDP, with tensor parallelism, fully sharded."""

import csv
from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import PHASES, Attempt, Job, Trainings, TrainingsOf, faults_in

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

SCRIPT = str(SCRIPTS / "lightning_fit.py")
SETTINGS = {"heartbeat_timeout_s": 100.0}  # compiling takes its time on a busy machine
Train = Callable[..., Job]


def in_phases(*more: str) -> list[str]:
    """Return faults of both kinds in three phases, by turns on two ranks, and a death at each of ``more``."""
    faults = ["sigkill@forward:rank=1,step=4", "exception@optimizer:rank=0,step=8"]
    return [*faults, "sigkill@after_optimizer:rank=1,step=12", *(f"sigkill@{place}" for place in more)]


def logged(job: Job) -> list[dict[str, str]]:
    """Return the rows that the user's logger has written, in one folder, without what recovery adds.

    The rows of a redone step may be there twice.
    """
    (path,) = (job.run_dir / "csv").rglob("metrics.csv")
    rows = [
        {name: value for name, value in row.items() if value and not name.startswith("checkpointless")}
        for row in csv.DictReader(path.read_text().splitlines())
    ]
    return list({tuple(row.items()): row for row in rows if row.keys() - {"epoch", "step"}}.values())


@pytest.fixture
def train(trainings_of: TrainingsOf) -> Train:
    trainings = trainings_of(SCRIPT, **SETTINGS)

    def compared(
        strategy: str, steps: int, *faults: str, features: str = "", made: int | None = None, ranks: int = 4
    ) -> Job:
        args = (str(steps), strategy, *filter(None, features.split(",")))
        job = trainings.rough(ranks, args, *faults, steps=steps if made is None else made)
        assert len(job.incidents) == len(faults)
        assert logged(trainings.calm(ranks, *args)) == logged(job)
        return job

    return compared


@pytest.mark.parametrize("kind", ["exception", "sigkill"])
def test_ddp_in_every_phase(train: Train, kind: str) -> None:
    """Over three epochs of eight batches, with what a user has: hooks, schedulers, validation, logged values."""
    train("ddp", 18, *faults_in(PHASES, kind, 4), features="validation,warmup")


def test_ddp_that_accumulates(train: Train) -> None:
    train("ddp", 16, *in_phases(), features="accumulate,fp16,overflow", ranks=2)


def test_a_compiled_model(train: Train) -> None:
    faults = ("exception@backward:rank=1,step=2", "sigkill@forward:rank=1,step=4")
    job = train("ddp", 6, *faults, features="compiled,validation", ranks=2)
    assert all("graphs: 0" not in job.log(rank) and "graphs: " in job.log(rank) for rank in (0, 1))


@pytest.mark.long  # test_plain_fsdp2.py has the same without Lightning
def test_hsdp_in_every_phase(train: Train) -> None:
    """The shard of a rank that dies comes from the other row of the mesh."""
    job = train("hsdp", 16, *faults_in(PHASES, "sigkill", 4), features="accumulate,bf16")
    assert [each.sources for each in job.incidents] == [((each.respawned[0] + 2) % 4,) for each in job.incidents]


@pytest.mark.long
def test_tensor_parallelism_in_every_phase(train: Train) -> None:
    train("hsdp-tp", 16, *faults_in(PHASES, "sigkill", 8), features="accumulate", ranks=8)


def test_a_stream(train: Train) -> None:
    """An iterable dataset is gone through once more, past what steps have had and not what was fetched ahead."""
    faults = ("exception@forward:rank=1,step=3", "exception@after_optimizer:rank=0,step=5")
    train("ddp", 7, *faults, features="stream,accumulate", ranks=2)


def test_settings_of_the_trainer_that_hooks_change(train: Train) -> None:
    """How many batches a step has, the clipping, when to validate, log and end: changed in the middle of an epoch.

    The last step that is asked for at first is not made.
    """
    train("ddp", 15, *in_phases(), features="settings,validation", made=14, ranks=2)


@pytest.mark.long  # the test above has such hooks
def test_a_callback_that_changes_how_many_batches_a_step_has(train: Train) -> None:
    """From 1 to 2 and 4, in epochs of eight batches, so that the last fault is in an epoch of two steps."""
    train("ddp", 16, *in_phases("backward:rank=0,step=16"), features="scheduled", ranks=2)


@pytest.mark.long
def test_a_loader_that_follows_from_where_it_is_made(train: Train) -> None:
    """``train_dataloader()`` and ``val_dataloader()`` read epoch and step, and Lightning calls them again."""
    faults = (
        "sigkill@forward:rank=1,step=12",
        "sigkill@after_optimizer:rank=0,step=16",
        "exception@data:rank=0,step=27",
    )
    train("ddp", 28, *faults, features="reads,reloads,validation", ranks=2)


@pytest.mark.long  # test_users_runs.py stops early, and has callbacks with state
def test_lightnings_own_callbacks(trainings: Trainings) -> None:
    """Those that go together, with a fault in the second epoch; training is stopped early, after the third.

    A trainer takes one progress bar, so each run has another one.
    """
    args = ("60", "ddp", "stock", "validation")
    job = trainings.rough(2, args, "sigkill@forward:rank=1,step=12", steps=24, more=("rich",))
    calm = trainings.calm(2, *args)
    rates = [[row["lr-AdamW"] for row in logged(each) if "lr-AdamW" in row] for each in (calm, job)]
    assert rates[0] == rates[1]
    assert len(rates[0]) == 24


@pytest.mark.long  # below ranks die where a save is due
@pytest.mark.parametrize("what", ["raises-in-save", "killed-in-save"])
def test_a_fault_within_a_save(trainings: Trainings, what: str) -> None:
    args = ("7", "ddp", "saves")
    job, saves = trainings.rough(2, args, more=(what,)), trainings.calm(2, *args)
    assert len(job.incidents) == 1
    names = [sorted(path.name for path in (each.run_dir / "saved").iterdir()) for each in (saves, job)]
    assert names[0] == names[1]
    assert logged(saves) == logged(job)


def test_fully_sharded_survives_exceptions(train: Train) -> None:
    """No rank holds what another one does, so a rank must not be lost; an exception costs nothing."""
    train("hsdp", 6, "exception@backward:rank=1,step=3", features="fully-sharded")


def test_saves_validations_and_workers(train: Train) -> None:
    """Ranks die where a save and a validation are due, and in the second epoch, whose order is another one."""
    faults = (
        "sigkill@between:rank=1,step=4",
        "sigkill@backward:rank=0,step=10",
        "exception@optimizer:rank=1,step=11",
    )
    job = train("ddp", 13, *faults, features="validation,saves,workers", ranks=2)
    names = sorted(path.name for path in (job.run_dir / "saved").iterdir())
    assert names == ["epoch=1-step=10.ckpt", "epoch=1-step=12.ckpt", "last.ckpt"]


def refused(features: str, reason: str, made: int, *faults: str) -> list[Any]:
    """Return a row without a fault, and for each fault one for make test-long; test_plain_loop.py has one."""
    rows = [pytest.param(features, reason, made, None, id=f"calm-{features}")]
    long = pytest.mark.long
    return rows + [
        pytest.param(features, reason, made, each, id=f"at-once-{features}", marks=long) for each in faults
    ]


@pytest.mark.parametrize(
    ("features", "reason", "made", "fault"),
    [
        *refused("manual", "leave out automatic_optimization=False", 0),
        *refused("lbfgs", "LBFGS computes gradients several times in one step", 0),
        *refused("twice", "optimizer_step() updates more than once in a step", 0),
        *refused("static", "leave static_graph out", 0),
        *refused("stream,stateful", "give it a __len__, or leave out its state_dict", 0),
        *refused(
            "averages", "StochasticWeightAveraging exchanges weights in hooks, from copies that a replaced", 0
        ),
        *refused("prunes", "ModelPruning gives the model masks while it trains", 0),
        # A forward pass that changes weights, and ranks that no longer hold the same: the second step shows it.
        *refused("bounds", "parameters were changed beside the update since step 1", 1),
        *refused("parts", "after step 1 it has other values on rank 1 than on rank 0", 1),
        # The second epoch begins with step 9.
        *(
            row
            for features, reason in {
                "frees": "net.0.weight is trained now and had requires_grad=False when DistributedDataParallel",
                "adds": "an optimizer has other parameters than at the beginning (add_param_group)",
                "exchanges": "the trainer has another optimizer than at the beginning",
            }.items()
            for row in refused(features, reason, 8, "exception@forward:rank=1,step=9")
        ),
        # Also if a fault makes it behind the step a second time, in a trainer that was made anew.
        *refused(
            "regroups",
            "accumulate_grad_batches was changed to 2 within the batches of a step",
            3,
            "exception@after_optimizer:rank=1,step=3",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(
    attempt: Attempt, features: str, reason: str, made: int, fault: str | None
) -> None:
    args = ("12", "ddp", *features.split(","))
    job = attempt(2, args=args, faults=() if fault is None else (fault,), code=1)
    assert reason in job.told(), job.story()
    if made == 0:
        with pytest.raises(FileNotFoundError, match="no recorded steps"):
            assert job.steps
    else:
        assert {record.step for record in job.steps[0]} == set(range(1, made + 1))
        assert all(record.step <= made for record in job.steps[1]), "nothing was trained behind that"


@pytest.mark.long
def test_parameters_that_are_frozen_and_trained_again_by_hooks(train: Train) -> None:
    """A hook does so at the beginning of an epoch, another after a validation; neither does it again later."""
    train("ddp", 22, *in_phases("data:rank=1,step=17"), features="freezes,validation", ranks=2)


def test_a_shard_whose_training_is_changed_is_noticed(attempt: Attempt) -> None:
    job = attempt(4, args=("12", "hsdp", "freezes"), code=1)
    assert "requires_grad of the parameter net.0.weight was changed behind fully_shard" in job.said[-1]


def test_a_step_of_the_modules_own(train: Train) -> None:
    """The module leaves updates out."""
    faults = ("exception@after_optimizer:rank=1,step=2", "sigkill@optimizer:rank=0,step=4")
    train("ddp", 6, *faults, "exception@between:rank=0,step=5", features="seldom", ranks=2)


@pytest.mark.long
def test_a_state_of_the_modules_that_differs_from_rank_to_rank_is_named(train: Train) -> None:
    """A new process gets a peer's, and this is said of what differs alone."""
    job = train("ddp", 5, "exception@forward:rank=0,step=2", "sigkill@forward:rank=2,step=4", features="own-state")
    logs = [job.log(rank) for rank in range(4)]
    said = "what on_save_checkpoint puts into checkpoint['rank'] differs from rank to rank: rank [2] gets a peer's"
    assert sum(log.count(said) for log in logs) > 0, job.story()
    assert not any("checkpoint['seen']" in log for log in logs)


def test_weights_that_were_exchanged_for_a_validation_are_not_taken_for_the_trained_ones(attempt: Attempt) -> None:
    """All ranks have others when one raises, so that nobody holds the trained ones: said, and not trained on."""
    args = ("8", "ddp", "validation", "swaps")
    job = attempt(2, args=args, code=1)
    assert "given up: parameters were changed beside the update since step 4 (ended)" in job.log(0)
