"""Defects that were put in on purpose are noticed: a test that cannot fail proves nothing.

Every mutant is put into a real NeMo job with the fault that brings it to light, and has to die: the job ends with
the reason, or its steps are not those of the undisturbed run. The controls are the same jobs without the defects.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.report.verify import Quantity, Steps, compare
from tests.ranks.jobs import Job, run_job, small
from tests.ranks.layouts import DROPOUT
from tests.ranks.mutants import UPDATE_HELD_UP
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

STEPS = 4
# The ranks themselves draw noise into the samples, so that training needs every one of the streams.
ARGS = (*small(4, STEPS), *DROPOUT, "data._target_=tests.ranks.noisy_text.NoisyTextDataModule")
CHECKSUM = ("checkpointless.enable_checksum=true",)


def callback(name: str, target: str, **settings: object) -> str:
    """Return an override that puts a callback of ``tests.ranks.mutants`` into the recipe."""
    given = "".join(f", {key}: {value}" for key, value in settings.items())
    return f"callbacks.{name}={{_target_: tests.ranks.mutants.{target}{given}}}"


def mutant(target: str, **settings: object) -> str:
    return callback("mutant", target, **settings)


def left_out(where: str, tensor: str, rank: int = 1) -> str:
    """Return the override for a tensor that is left out of a transfer."""
    return mutant("TensorLeftOut", where=where, tensor=tensor, rank=rank)


@dataclass(frozen=True)
class Scene:
    faults: tuple[str, ...]
    args: tuple[str, ...] = ()
    target: int = 3  # the step that its first recovery resumes at, if nothing is wrong
    nproc: int = 4


# Rank 1 is filled; the others take back what is theirs. TWICE adds checksums and a fault after that.
KILLED = Scene(("sigkill@forward:rank=1,step=3",), target=2, nproc=2)
TWICE = Scene((*KILLED.faults, "exception@backward:rank=0,step=4"), CHECKSUM, target=2)
# The others are in the middle of an update when rank 1 is lost before its own, or raises after it. (It waits for
# them to get there.)
HELD_UP = (callback("hold", "HeldUpUpdate", step=3, ranks="[0,2,3]"),)
WAIT = "slow@optimizer:rank=1,step=3,seconds=0.5"
BEFORE_UPDATE = Scene((WAIT, "sigkill@optimizer:rank=1,step=3"), HELD_UP)
AFTER_UPDATE = Scene((WAIT, "exception@after_optimizer:rank=1,step=3"), HELD_UP)
# The update of rank 1 fails half-way when the others have made theirs.
FAILING = Scene((WAIT,), (callback("hold", "HeldUpUpdate", step=3, ranks="[1]", fails="true"),))


def run(zygote: Zygote, directory: Path, scene: Scene, *defects: str, code: int = 0) -> Job:
    """Run a disturbed job to its end, and see that it was disturbed as it should be."""
    args = (*ARGS, *scene.args, *defects)
    job = run_job(zygote, directory / "run", scene.nproc, args=args, faults=scene.faults, code=code)
    assert fired(job.run_dir) == dict.fromkeys(scene.faults, 1), job.story()
    return job


@pytest.mark.parametrize(
    ("scene", "harmless"),
    [
        pytest.param(
            KILLED, (mutant("StaleStreams", steps=0), callback("data", "ShiftedData", samples=0)), id="killed"
        ),
        pytest.param(TWICE, (left_out("nowhere", "word_embeddings"),), id="twice", marks=pytest.mark.long),
        pytest.param(BEFORE_UPDATE, (), id="before-update", marks=pytest.mark.long),
        pytest.param(AFTER_UPDATE, (), id="after-update", marks=pytest.mark.long),
        pytest.param(FAILING, (), id="failing", marks=pytest.mark.long),
    ],
)
def test_without_a_defect_every_bit_is_the_same(
    nemo_zygote: Zygote, undisturbed: Callable[..., Steps], tmp_path: Path, scene: Scene, harmless: tuple[str, ...]
) -> None:
    """These are the controls: what the mutants put into the product is made harmless."""
    job = run(nemo_zygote, tmp_path, scene, *harmless)
    job.assert_same(undisturbed(scene.nproc, ARGS), STEPS)
    *earlier, last = (incident.outcome for incident in job.incidents)
    assert last is Outcome.RESUMED
    assert set(earlier) <= {Outcome.RESUMED, Outcome.ESCALATED}  # the next step's fault may come before all said so
    assert job.incidents[0].target == scene.target
    if scene.args == HELD_UP:
        noticed = {event.rank: event.fields["noticed"] for event in job.events(UPDATE_HELD_UP)}
        assert noticed == dict.fromkeys((0, 2, 3), True), "the fault came in the middle of their updates"


@pytest.mark.parametrize(
    ("scene", "defect", "quantity", "target"),
    [
        pytest.param(KILLED, mutant("StaleStreams"), Quantity.LOSS, 2, id="stale-streams"),
        *(
            pytest.param(scene, defect, quantity, target, id=name, marks=pytest.mark.long)
            for name, scene, defect, quantity, target in (
                ("a-failed-update-not-noted", FAILING, mutant("LockWithoutTorn"), Quantity.PARAMS, 3),
                ("stale-numpy", KILLED, mutant("StaleStreams", only="'numpy'"), Quantity.LOSS, 2),
                ("stale-megatron", KILLED, mutant("StaleStreams", only="'source:megatron'"), Quantity.LOSS, 2),
                ("no-streams", KILLED, mutant("LostStreams"), Quantity.LOSS, 2),
                ("a-sample-skipped", KILLED, mutant("ShiftedData", samples=1), Quantity.LOSS, 2),
                # What is left out of the plan has no digest that could be wrong: the losses show it.
                ("a-tensor-not-offered", KILLED, left_out("source", "word_embeddings"), Quantity.LOSS, 2),
                ("a-tensor-beside-its-place", KILLED, left_out("room", "word_embeddings"), Quantity.LOSS, 2),
                ("a-tensor-not-taken-back", KILLED, left_out("own", "output_layer", 0), Quantity.LOSS, 2),
            )
        ),
    ],
)
def test_a_mutant_trains_on_and_its_steps_show_it(
    nemo_zygote: Zygote,
    undisturbed: Callable[..., Steps],
    tmp_path: Path,
    scene: Scene,
    defect: str,
    quantity: Quantity,
    target: int,
) -> None:
    job = run(nemo_zygote, tmp_path, scene, defect)
    (incident,) = job.incidents
    assert incident.outcome in (Outcome.RESUMED, Outcome.INEXACT)  # peers may have seen another loss
    assert incident.target == target
    verdict = compare(undisturbed(scene.nproc, ARGS), job.steps)
    assert (verdict.equal, [*verdict.missing], [*verdict.repeated]) == (False, [], [])
    assert verdict.difference is not None
    assert (verdict.difference.step, verdict.difference.quantity) == (3, quantity), verdict.sentence


DAMAGED = "buckets arrived damaged from ranks"
CHANGED = "parameters were changed beside the update since step 2"
GIVEN_UP = (
    "no living rank holds the shard of ranks 0, 2 (an update failed half-way, or the state was given up, on 0, 2)"
)
DIFFER = "the replicas of the shard of ranks 1, 3 differ at step 3"


@pytest.mark.parametrize(
    ("scene", "defect", "reason", "last"),
    [
        pytest.param(KILLED, left_out("wire", "word_embeddings"), DAMAGED, 2, id="a-tensor-lost-on-the-way"),
        # Half an update left in: no rank holds the committed weights, which must not be offered.
        pytest.param(BEFORE_UPDATE, mutant("NoLock"), CHANGED, 2, id="no-lock"),
        *(
            pytest.param(scene, defect, reason, last, id=name, marks=pytest.mark.long)
            for name, scene, defect, reason, last in (
                ("a-lock-that-does-not-wait", BEFORE_UPDATE, mutant("LockWithoutWaiting"), GIVEN_UP, 2),
                ("no-lock-and-an-update-made-again", AFTER_UPDATE, mutant("NoLock"), CHANGED, 2),
                ("a-tensor-not-asked-for", TWICE, left_out("order", "exp_avg"), DIFFER, 3),
            )
        ),
    ],
)
def test_a_mutant_is_noticed_and_ends_the_job(
    nemo_zygote: Zygote, tmp_path: Path, scene: Scene, defect: str, reason: str, last: int
) -> None:
    job = run(nemo_zygote, tmp_path, scene, defect, code=1)
    assert any(reason in line for line in job.said), job.said
    assert max(record.step for records in job.steps.values() for record in records) == last
