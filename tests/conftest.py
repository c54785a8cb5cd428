"""Set up every test and every process that a test starts."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.marks import IMPORTED, left_out, marks_of

# torch says so at import, in each process, where nvidia-resiliency-ext (NeMo's logger needs it) has brought pynvml.
os.environ.setdefault("PYTHONWARNINGS", "ignore:The pynvml package is deprecated:FutureWarning")

# How long an example takes says more of the machine, and of what else runs there, than of the code.
settings.register_profile("no-time", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-time")
# make test-long loads it with --hypothesis-profile; it draws this many times as much (tests/drawn.py).
settings.register_profile("nightly", settings.get_profile("no-time"), max_examples=20 * 100)
settings.register_profile("quick", settings.get_profile("no-time"), max_examples=20)  # a fifth, for make test-fast


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file of which every test is left out: it may import NeMo, which takes half a minute."""
    if collection_path.suffix == ".py" and marks_of(collection_path) & left_out(config.option.markexpr):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that differ from process to process: several that run tests side by side compare them."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"give the parameters of {item.nodeid} ids that are the same in every process")


@pytest.fixture(scope="session")
def zygotes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which all workers of this run find the processes that they fork ranks from."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture
def alone() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _needs_a_framework_only_if_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that no other test imports NeMo or Lightning in a run without their tests."""
    yield
    for mark in left_out(request.config.option.markexpr):
        loaded = IMPORTED.get(mark, set()) & sys.modules.keys()
        assert not loaded, f"{', '.join(sorted(loaded))} is loaded: the test or its file needs the mark {mark}"
