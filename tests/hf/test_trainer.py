"""Hugging Face's Trainer comes through faults in every phase, with the bits and the callbacks of a calm run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("trains.py")
PHASES = ("data", "forward", "backward", "before_optimizer", "optimizer", "after_optimizer", "between")
STEPS = 16
WORKERS = ("dataloader_num_workers=2", "dataloader_persistent_workers=true", "max_steps=9", "save_steps=5")
Calm = Callable[..., Job]


def _train(zygote: Zygote, run_dir: Path, *args: str, faults: tuple[str, ...] = (), ranks: int = 4) -> Job:
    job = run_job(
        zygote,
        run_dir,
        ranks,
        script=str(SCRIPT),
        args=(str(run_dir) + "-saves", *args),
        faults=faults,
        limit_s=280.0,
        heartbeat_timeout_s=100.0,  # compiling takes its time on a busy machine
    )
    assert job.code == 0, job.story()
    assert fired(job.run_dir) == dict.fromkeys(faults, 1)
    return job


def _left(job: Job, rank: int) -> list[object]:
    """Return what a rank printed at the end: its log without times, its callback's attributes, tokens and loss."""
    (line,) = [line for line in job.log(rank).splitlines() if line.startswith("left ")]
    left: list[object] = json.loads(line.removeprefix("left "))
    return left


def require_same_steps(calm: Job, rough: Job, steps: int) -> None:
    """Require that two jobs have made the same steps, bit by bit."""
    rough.assert_same(calm.steps, steps)


def _require_equal(calm: Job, rough: Job, steps: int, ranks: int = 4) -> None:
    require_same_steps(calm, rough, steps)
    assert [_left(rough, rank) for rank in range(ranks)] == [_left(calm, rank) for rank in range(ranks)]


@pytest.fixture(scope="module")
def calm(hf_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Return a function for a job without faults, which is made once."""

    @cache
    def run(*args: str, ranks: int = 4) -> Job:
        return _train(hf_zygote, tmp_path_factory.mktemp("calm") / "run", *args, ranks=ranks)

    return run


@pytest.mark.parametrize("kind", ["exception", "sigkill"])
def test_every_phase(hf_zygote: Zygote, calm: Calm, tmp_path: Path, kind: str) -> None:
    faults = tuple(f"{kind}@{phase}:rank={at % 4},step={2 * at + 2}" for at, phase in enumerate(PHASES))
    job = _train(hf_zygote, tmp_path / "run", faults=faults)
    resumed = [each.resumed_after for each in job.incidents]
    # In the update of step 10 the others go on if they have the averaged gradients before the fault reaches them.
    assert resumed.pop(PHASES.index("optimizer")) in (9, 10), job.story()
    assert resumed == [1, 3, 5, 7, 12, 14], job.story()
    _require_equal(calm(), job, STEPS)


def test_what_follows_an_update_is_made_again(hf_zygote: Zygote, calm: Calm, tmp_path: Path) -> None:
    """In an evaluation, in a save, at the end of an epoch, behind the last step; one fault right after another."""
    faults = (
        "sigkill@after_optimizer:rank=1,step=3",
        "sigkill@data:rank=2,step=8",
        "sigkill@data:rank=3,step=9",
        "sigkill@between:rank=2,step=12",
        "exception@between:rank=3,step=16",
    )
    fails = json.dumps({"evaluate": 6, "save": 8})
    job = _train(hf_zygote, tmp_path / "run", f"fails={fails}", faults=faults)
    assert all(f"asked for, in {where}" in job.story() for where in ("evaluate", "save")), job.story()
    assert 5 <= len(job.incidents) <= 7, job.story()  # one fault may come while another one is handled
    _require_equal(calm(), job, STEPS)
    saves = [sorted(each.name for each in Path(f"{run.run_dir}-saves").iterdir()) for run in (calm(), job)]
    assert saves[0] == saves[1] == ["checkpoint-12", "checkpoint-16"]


def test_workers_draw_the_same(hf_zygote: Zygote, calm: Calm, tmp_path: Path) -> None:
    """Persistent workers exchange items at random, in the second epoch, too."""
    faults = ("exception@forward:rank=0,step=2", "sigkill@backward:rank=1,step=4", "dataloader@data:rank=1,step=9")
    job = _train(hf_zygote, tmp_path / "run", *WORKERS, faults=faults, ranks=2)
    _require_equal(calm(*WORKERS, ranks=2), job, 9, ranks=2)


@pytest.mark.parametrize("more", [(), ("holds=true",)], ids=["", "held"])
def test_resuming_from_a_save(hf_zygote: Zygote, calm: Calm, tmp_path: Path, more: tuple[str, ...]) -> None:
    """A job that begins with a checkpoint of the Trainer saves as it would have after a fault.

    Held, a rank has begun no step when another one fails in it: all resume before the Trainer has loaded streams.
    """
    resume = f"resume={json.dumps(f'{calm().run_dir}-saves/checkpoint-12')}"
    faults = (
        "exception@forward:rank=0,step=13",
        "sigkill@optimizer:rank=1,step=14",
        "sigkill@between:rank=2,step=15",
    )
    job = _train(hf_zygote, tmp_path / "run", resume, *more, faults=faults)
    _require_equal(calm(resume), job, 4)


def test_a_compiled_model(hf_zygote: Zygote, calm: Calm, tmp_path: Path) -> None:
    compiled = ("torch_compile=true", 'torch_compile_backend="aot_eager"', "max_steps=5")
    faults = ("exception@backward:rank=1,step=2", "sigkill@forward:rank=1,step=4")
    job = _train(hf_zygote, tmp_path / "run", *compiled, faults=faults, ranks=2)
    _require_equal(calm(*compiled, ranks=2), job, 5, ranks=2)
    assert all(re.search(r"^graphs: [1-9]", job.log(rank), re.M) for rank in (0, 1))


def test_draws_ahead_of_a_step_are_refused(hf_zygote: Zygote, tmp_path: Path) -> None:
    job = run_job(hf_zygote, tmp_path / "run", 2, script=str(SCRIPT), args=(str(tmp_path / "saves"), "noisy=true"))
    assert job.code == 1
    assert "let a worker draw them (dataloader_num_workers=1)" in "\n".join(job.said)
