import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from checkpointless.observability.report.verify import Steps
from tests.ranks.jobs import RUNNER, Attempt, Disturb, Job, Trainings, TrainingsOf, run_job, small
from tests.ranks.nemo_zygote import MODULES, Zygote
from tests.ranks.users.runs import Runs

HAS_NEMO = find_spec("nemo") is not None


def _has(part: str) -> bool:
    return find_spec("megatron") is not None and find_spec(part) is not None


WITHOUT_NEMO = (
    *(["checkpointless.integrations.megatron_bridge"] if _has("megatron.bridge") else []),
    *(["checkpointless.megatron.pretrain"] if _has("megatron.training") else []),
    "checkpointless.callbacks.external",
    "checkpointless.strategies.torch_strategies",
    "tests.ranks.jobs",
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not HAS_NEMO and item.get_closest_marker("nemo") is not None:
        pytest.skip("needs NeMo")


@pytest.fixture(scope="session")
def nemo_zygote(zygotes: Path) -> Iterator[Zygote]:
    """Yield a process that has imported NeMo, if there is one, on the CPU platform, and forks ranks quickly."""
    zygote = Zygote(MODULES if HAS_NEMO else WITHOUT_NEMO, zygotes)
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def trainings_of(nemo_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> TrainingsOf:
    """Return a function for the trainings with a script; each kind of undisturbed one is made once."""
    return cache(partial(Trainings, nemo_zygote, tmp_path_factory))


@pytest.fixture(scope="session")
def of_recipe(trainings_of: TrainingsOf) -> Trainings:
    return trainings_of(RUNNER)


@pytest.fixture
def undisturbed(of_recipe: Trainings) -> Callable[..., Steps]:
    return lambda nproc, args: of_recipe.calm(nproc, *args).steps


@pytest.fixture
def disturb(of_recipe: Trainings) -> Disturb:
    """Return a function that trains with overrides of :func:`small` and ``args`` to the bits of no fault."""

    def run(nproc: int, steps: int, *faults: str, args: tuple[str, ...] = (), **settings: Any) -> Job:
        return of_recipe.rough(nproc, (*small(nproc, steps), *args), *faults, steps=steps, **settings)

    return run


@pytest.fixture(scope="session")
def runs(trainings_of: TrainingsOf) -> Runs:
    return Runs(trainings_of)


@pytest.fixture(scope="module")
def trainings(request: pytest.FixtureRequest, trainings_of: TrainingsOf) -> Trainings:
    """Return trainings with the script that the test's module calls ``SCRIPT``, and its ``SETTINGS``, if any."""
    return trainings_of(request.module.SCRIPT, **getattr(request.module, "SETTINGS", {}))


@pytest.fixture
def attempt(request: pytest.FixtureRequest, nemo_zygote: Zygote, tmp_path: Path) -> Attempt:
    """Return :func:`run_job` for the module's ``SCRIPT``, or for the recipe."""
    script = getattr(request.module, "SCRIPT", RUNNER)
    return partial(run_job, nemo_zygote, tmp_path / "run", script=script)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Yield a folder whose path is short enough for Unix sockets below it; those of pytest are too long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)
