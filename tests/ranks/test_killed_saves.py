"""Test that a job whose processes are all killed in a save goes on from the newest checkpoint that is whole."""

import contextlib
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from checkpointless.observability.report.verify import Steps
from checkpointless.observability.telemetry.steps import read_steps
from tests.ranks.jobs import Scene, run_job, run_nodes
from tests.ranks.layouts import RESUME, with_checkpoints
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo]

NPROC = 2
LIMIT_S = 120.0


def overrides(storage: Path, steps: int, in_background: bool) -> tuple[str, ...]:
    """Return overrides for a checkpoint every second step, of which one is kept, and for NeMo's auto-resume."""
    return (
        f"trainer.max_steps={steps}",
        f"strategy.ckpt_async_save={str(in_background).lower()}",
        *with_checkpoints(storage, 2, "save_top_k: 0, filename: 'it-{step}'", ", use_datetime_version: false"),
        RESUME,
    )


def whole(storage: Path) -> set[Path]:
    """Return the checkpoints that are not marked as unfinished."""
    return {
        path
        for path in storage.glob("**/checkpoints/*-last")
        if not path.with_name(f"{path.name}-unfinished").exists()
    }


def newest(storage: Path) -> int:
    """Return after which step the newest whole checkpoint was made; 0: there is none."""
    return max(map(made_after, whole(storage)), default=0)


def made_after(path: Path) -> int:
    """Return the step after which a checkpoint, or the one that a marker marks, was made."""
    return int(path.name.split("step=")[1].split("-")[0]) + 1


def kill_in_a_save(seed: int, within_s: float, storage: Path, killed: list[int]) -> Callable[[Scene], None]:
    """Return what kills all processes of a job at a random moment, and notes that it did."""

    def saving() -> bool:
        return any(made_after(path) > newest(storage) for path in storage.glob("**/checkpoints/*-last-unfinished"))

    def kill(scene: Scene) -> None:
        scene.wait_for((scene.run_dir / "events.jsonl").exists, LIMIT_S)
        scene.wait_for(lambda: scene.stages("job"), LIMIT_S)
        # What an earlier job has left unfinished is removed before the first step.
        scene.wait_for(lambda: list((scene.run_dir / "steps").glob("rank-0.jsonl")), LIMIT_S)
        # NeMo refuses to resume where there is no last checkpoint but an unfinished one.
        scene.wait_for(lambda: newest(storage) and saving(), LIMIT_S)
        time.sleep(random.Random(seed).uniform(0.0, within_s))
        (agent,) = (psutil.Process(event.pid) for event in scene.stages("job") if event.edge == "begin")
        for process in [agent, *agent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        killed.append(seed)

    return kill


@pytest.mark.parametrize(
    ("saves", "within_s"),
    [
        pytest.param(1, 0.5, marks=pytest.mark.timeout(400), id="once"),
        pytest.param(50, 0.5, marks=[pytest.mark.long, pytest.mark.timeout(3600)], id="often"),
    ],
)
def test_after_a_kill_in_a_save_the_newest_whole_checkpoint_is_resumed_from(
    nemo_zygote: Zygote, undisturbed: Callable[..., Steps], tmp_path: Path, saves: int, within_s: float
) -> None:
    # On a quiet machine a job makes many steps until it is killed. NeMo's checkpoint at its end has no optimizer.
    steps, storage, killed = 10 * saves + round(20 * within_s), tmp_path / "nemo", list[int]()
    reference = undisturbed(NPROC, (f"trainer.max_steps={steps}",))
    resumed, kept = list[int](), set[Path]()  # kept: not yet removed at a kill, as with NeMo alone
    for number in range(saves + 1):
        expected, run_dir = newest(storage), tmp_path / f"run-{number}"
        kept |= {path for path in whole(storage) if expected - 4 <= made_after(path) < expected}
        args = overrides(storage, steps, in_background=number % 2 == 1)
        if number < saves:
            act = kill_in_a_save(number, within_s, storage, killed)
            run_nodes(nemo_zygote, run_dir, 1, NPROC, args=args, lost=(0,), meanwhile=act, limit_s=LIMIT_S)
        else:
            run_job(nemo_zygote, run_dir, NPROC, args=args, limit_s=5 * LIMIT_S)
        for rank, records in read_steps(run_dir).items():
            assert records[0].step == expected + 1, f"job {number} did not resume after step {expected}"
            for record in records:
                (same,) = (each for each in reference[rank] if each.step == record.step)
                assert (record.loss, record.params) == (same.loss, same.params), f"job {number}, step {record.step}"
        resumed.append(expected)
    assert killed == list(range(saves))
    assert resumed == sorted(resumed)
    left = set(storage.glob("**/checkpoints/*")) - kept
    assert [path.name.endswith("-last") and made_after(path) for path in left] == [steps]
