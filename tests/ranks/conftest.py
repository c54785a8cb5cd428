import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.observability.report.verify import Steps
from tests.ranks.jobs import Disturb, Job, known_steps, run_job, small
from tests.ranks.nemo_zygote import MODULES, Zygote

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
def zygote(nemo_zygote: Zygote) -> Zygote:
    """Return a process that forks ranks which need no NeMo: the one that has it, if it is installed."""
    return nemo_zygote


@pytest.fixture(scope="session")
def undisturbed(nemo_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Steps]:
    """Return a function for the steps of a run without faults; it makes each kind of run once."""
    return known_steps(nemo_zygote, tmp_path_factory)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Yield a folder whose path is short enough for Unix sockets below it; those of pytest are too long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def disturb(nemo_zygote: Zygote, undisturbed: Callable[..., Steps], tmp_path: Path) -> Disturb:
    """Return a function that runs with faults, and requires that each happened and nothing differs at the end.

    The run is :func:`small`, if ``args`` do not say otherwise.
    """

    def run(nproc: int, steps: int, *faults: str, args: tuple[str, ...] = (), **settings: Any) -> Job:
        args = (*small(nproc, steps), *args)
        reference = undisturbed(nproc, args)
        job = run_job(nemo_zygote, tmp_path / "run", nproc, args=args, faults=faults, **settings)
        assert job.code == 0, job.story()
        assert fired(job.run_dir) == dict.fromkeys(faults, 1)
        job.assert_same(reference, steps)
        return job

    return run
