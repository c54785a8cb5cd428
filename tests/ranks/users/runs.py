"""Run jobs of users, and keep those that no fault disturbs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import Zygote

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


@dataclass
class Calm:
    """Makes users' runs, each undisturbed one only once."""

    zygote: Zygote
    folder: Callable[[str], Path]
    _known: dict[Run, Job] = field(default_factory=dict)

    def job(self, run: Run) -> Job:
        if run not in self._known:
            self._known[run] = self.make(run, self.folder("calm") / "run")
        return self._known[run]

    def make(self, run: Run, run_dir: Path, *faults: str, code: int = 0, **settings: Any) -> Job:
        job = run_job(
            self.zygote,
            run_dir,
            run.nproc,
            script=str(SCRIPTS / run.script),
            args=run.words(self.checkpoint(run)),
            faults=faults,
            # Megatron's first checkpoint imports torch again on every rank, 20 s on a busy machine.
            **{"heartbeat_timeout_s": 60.0, "limit_s": 200.0, **settings},
        )
        assert job.code == code, job.story()
        return job

    def checkpoint(self, run: Run) -> Path | None:
        """Return the checkpoint that ``run`` begins at, if any."""
        if not run.resumed:
            return None
        before = Run(f"{run.features},modelckpt", run.resumed + 2, run.layout, nproc=run.nproc)
        # At the end of a training the optimizer is not saved.
        (found,) = (self.job(before).run_dir / "nemo").glob(f"**/checkpoints/users-step={run.resumed - 1}")
        return found
