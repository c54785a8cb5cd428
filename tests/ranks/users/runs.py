"""Run jobs of users, and keep those that no fault disturbs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks.jobs import Job, Trainings, TrainingsOf

SCRIPTS = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    features: str
    steps: int | tuple[int, ...] = 6
    layout: tuple[str, ...] = ()
    script: str = "train.py"
    nproc: int = 2
    resumed: int = 0

    def words(self, checkpoint: Path | None) -> tuple[str, ...]:
        resume = () if checkpoint is None else ("--resume-from", str(checkpoint))
        steps = (self.steps,) if isinstance(self.steps, int) else self.steps
        return ("--steps", *map(str, steps), "--features", self.features, *self.layout, *resume)


class Runs:
    """Makes users' runs, each undisturbed one only once."""

    def __init__(self, trainings_of: TrainingsOf) -> None:
        self._trainings_of = trainings_of

    def calm(self, run: Run) -> Job:
        return self._like(run).calm(run.nproc, *run.words(self.checkpoint(run)))

    def make(self, run: Run, *faults: str, **settings: Any) -> Job:
        return self._like(run).run(run.nproc, run.words(self.checkpoint(run)), *faults, **settings)

    def _like(self, run: Run) -> Trainings:
        # Megatron's first checkpoint imports torch again on every rank, 20 s on a busy machine.
        return self._trainings_of(str(SCRIPTS / run.script), heartbeat_timeout_s=60.0, limit_s=200.0)

    def checkpoint(self, run: Run) -> Path | None:
        """Return the checkpoint that ``run`` begins at, if any."""
        if not run.resumed:
            return None
        before = Run(f"{run.features},modelckpt", run.resumed + 2, run.layout, nproc=run.nproc)
        # At the end of a training the optimizer is not saved.
        (found,) = (self.calm(before).run_dir / "nemo").glob(f"**/checkpoints/users-step={run.resumed - 1}")
        return found
