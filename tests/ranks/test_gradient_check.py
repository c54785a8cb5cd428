"""Test that gradients that a device computes wrongly are found before the update, and the step is redone."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.observability.report.summary import build_report
from checkpointless.observability.telemetry.events import read_events
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Job, run_job, run_nodes, small
from tests.ranks.layouts import DROPOUT, PP2
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 20  # more than there are parameters: the gradient of another one is damaged in each


def _train(zygote: Zygote, run_dir: Path, *faults: str, every: int = 1, way: str = "") -> Job:
    script = str(SCRIPTS / "plain_checked.py")
    return run_job(zygote, run_dir, 3, script=script, args=(str(STEPS), str(every), way), faults=faults)


def _found(job: Job) -> list[tuple[int | None, int | None, bool]]:
    found = build_report(str(job.run_dir), read_events(job.run_dir)).corrupted
    return [(each["rank"], each["step"], each["redone"]) for each in found]


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return a job that checks nothing but its first step."""
    job = _train(zygote, tmp_path_factory.mktemp("checked") / "run", every=1000)
    assert job.code == 0, job.story()
    return job


def test_a_flip_in_the_gradient_or_the_output_of_each_layer_is_found_and_healed(
    zygote: Zygote, tmp_path: Path, undisturbed: Job
) -> None:
    places = [("gradient", "activation")[step // 2 % 2] for step in range(STEPS + 1)]
    faults = [f"bitflip@{places[step]}:rank={step % 3},step={step}" for step in range(1, STEPS + 1, 2)]
    job = _train(zygote, tmp_path / "run", *faults)
    assert job.code == 0, job.story()
    assert fired(job.run_dir) == dict.fromkeys(faults, 1)
    assert _found(job) == [(step % 3, step, True) for step in range(1, STEPS + 1, 2)]
    assert "rank 1 raised CorruptedGradientError at step 1: the gradient of" in "\n".join(job.said)
    assert all(incident.steps_lost == 0 for incident in job.incidents)
    job.assert_same(undisturbed.steps, STEPS)


def test_a_rank_that_was_wrong_twice_goes_on_on_a_spare(zygote: Zygote, tmp_path: Path) -> None:
    faults = ("bitflip@gradient:rank=1,step=2", "bitflip@activation:rank=1,step=4")
    script, args = str(SCRIPTS / "plain_checked.py"), ("8", "1", "waits")
    jobs = run_nodes(zygote, tmp_path / "run", 2, 1, script=script, args=args, faults=faults, spares=1)
    job = jobs[0]
    assert job is not None
    assert job.code == 0, job.story()
    assert [each.how for each in job.incidents] == ["exception", "exception", "planned"]
    assert any("node 1 moves to a spare (rank 1 has computed gradients wrongly twice)" in line for line in job.said)
    calm = run_job(zygote, tmp_path / "calm", 2, script=script, args=("8", "1000"))
    job.assert_same(calm.steps, 8)


def test_checks_change_nothing_and_find_nothing_and_what_is_not_checked_is_not_seen(
    zygote: Zygote, tmp_path: Path, undisturbed: Job
) -> None:
    job = _train(zygote, tmp_path / "checked")
    assert (job.code, job.incidents, _found(job)) == (0, [], [])
    job.assert_same(undisturbed.steps, STEPS)
    fault = "bitflip@gradient:rank=1,step=6"
    job = _train(zygote, tmp_path / "flipped", fault, every=7)
    assert (job.code, job.incidents, _found(job)) == (0, [], [])
    assert fired(job.run_dir) == {fault: 1}


@pytest.mark.parametrize(
    ("every", "way", "reason"),
    [
        (2, "random", "three runs of the forward and backward pass of step 1 give three gradients of"),
        (2, "forgets", "sdc_check_every=2 finds nothing to check in step 1: run the forward and backward pass"),
        (0, "", "sdc_check_every is a number of steps from 1 on (None: no checks), not 0"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    zygote: Zygote, tmp_path: Path, every: int, way: str, reason: str
) -> None:
    job = _train(zygote, tmp_path / "run", every=every, way=way)
    assert job.code != 0
    assert reason in "\n".join(job.said), job.story()


def _fit(zygote: Zygote, run_dir: Path, *faults: str, every: int, features: tuple[str, ...] = ()) -> Job:
    script = str(SCRIPTS / "lightning_checked.py")
    return run_job(zygote, run_dir, 2, script=script, args=("12", str(every), *features), faults=faults)


def _ends(job: Job) -> list[str]:
    return [line for rank in range(2) for line in job.log(rank).splitlines() if line.startswith("ends with")]


def test_lightning_finds_and_heals_them_and_a_check_is_not_seen_in_what_is_logged(
    zygote: Zygote, tmp_path: Path
) -> None:
    calm = _fit(zygote, tmp_path / "calm", every=1000)
    checked = _fit(zygote, tmp_path / "checked", every=1)
    assert (calm.code, checked.code, checked.incidents, _found(checked)) == (0, 0, [], []), checked.story()
    checked.assert_same(calm.steps, 12)
    assert _ends(checked) == _ends(calm) != []
    faults = [f"bitflip@gradient:rank={step % 2},step={step}" for step in range(2, 13, 3)]
    job = _fit(zygote, tmp_path / "run", *faults, every=1)
    assert (job.code, fired(job.run_dir)) == (0, dict.fromkeys(faults, 1)), job.story()
    assert _found(job) == [(step % 2, step, True) for step in range(2, 13, 3)]
    job.assert_same(calm.steps, 12)
    assert _ends(job) == _ends(calm)


def test_lightning_refuses_sharded_gradients(zygote: Zygote, tmp_path: Path) -> None:
    job = _fit(zygote, tmp_path / "run", every=2, features=("sharded",))
    assert job.code != 0
    assert "which sharded parameters (FSDP2, DTensors) do not show: leave it out" in "\n".join(job.said)


@pytest.mark.nemo
@pytest.mark.parametrize(("ranks", "more"), [pytest.param(2, (), marks=pytest.mark.long), (4, PP2)])
def test_nemo_finds_and_heals_them(nemo_zygote: Zygote, tmp_path: Path, ranks: int, more: tuple[str, ...]) -> None:
    args = (*small(4, 5), *DROPOUT, *more)
    every = ("checkpointless.sdc_check_every=1",)
    calm = run_job(nemo_zygote, tmp_path / "calm", ranks, args=args)
    checked = run_job(nemo_zygote, tmp_path / "checked", ranks, args=(*args, *every))
    assert (calm.code, checked.code, checked.incidents, _found(checked)) == (0, 0, [], []), checked.story()
    checked.assert_same(calm.steps, 5)
    faults = [f"bitflip@gradient:rank={step % ranks},step={step}" for step in range(1, 6, 2)]
    job = run_job(nemo_zygote, tmp_path / "run", ranks, args=(*args, *every), faults=tuple(faults))
    assert (job.code, fired(job.run_dir)) == (0, dict.fromkeys(faults, 1)), job.story()
    assert {(step % ranks, step, True) for step in range(1, 6, 2)} <= {*_found(job)}
    job.assert_same(calm.steps, 5)


@pytest.mark.nemo
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("bf16=1", marks=pytest.mark.long),
        "pp=2 tp=2 distributed=0",
        pytest.param("ep=2 distributed=0", marks=pytest.mark.long),
    ],
)
def test_a_loop_over_megatron_core_finds_and_heals_them(nemo_zygote: Zygote, tmp_path: Path, layout: str) -> None:
    def train(name: str, every: int, *faults: str) -> Job:
        script, args = str(SCRIPTS / "megatron_loop.py"), ("8", *layout.split(), f"check={every}")
        job = run_job(nemo_zygote, tmp_path / name, 4, script=script, args=args, faults=faults)
        assert (job.code, fired(job.run_dir)) == (0, dict.fromkeys(faults, 1)), job.story()
        return job

    calm, checked = train("calm", 1000), train("checked", 1)
    assert (checked.incidents, _found(checked)) == ([], [])
    checked.assert_same(calm.steps, 8)
    places = [(step % 4, step) for step in range(1, 9, 2)]
    kinds = ("gradient", "activation")
    faults = [f"bitflip@{kinds[step // 2 % 2]}:rank={rank},step={step}" for rank, step in places]
    job = train("run", 1, *faults)
    assert {(rank, step, True) for rank, step in places} <= {*_found(job)}
    assert all(incident.steps_lost == 0 for incident in job.incidents)
    job.assert_same(calm.steps, 8)
