"""Tests that need transformers 5: ``make test-transformers`` runs them. NeMo 2.7 wants version 4."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.ranks.conftest import attempt, trainings, trainings_of  # noqa: F401
from tests.ranks.nemo_zygote import Zygote

try:
    collect_ignore_glob = ["test_*.py"] if int(version("transformers").partition(".")[0]) < 5 else []
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def nemo_zygote(zygotes: Path) -> Iterator[Zygote]:
    """Yield what ranks are forked from here: it has imported transformers in place of NeMo."""
    model = "transformers.models.llama.modeling_llama"
    modules = ("checkpointless.integrations.transformers", model, "datasets", "tests.ranks.jobs")
    zygote = Zygote(modules, zygotes)
    yield zygote
    zygote.close()
