"""Tests that need torchtitan: ``make test-titan`` runs them, on top of the environment with Python 3.12."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.ranks.conftest import trainings, trainings_of  # noqa: F401
from tests.ranks.nemo_zygote import Zygote

collect_ignore_glob = [] if find_spec("torchtitan") else ["test_*.py"]


@pytest.fixture(scope="session")
def nemo_zygote() -> Iterator[Zygote]:
    """Yield what ranks are forked from here: it has imported torchtitan in place of NeMo."""
    zygote = Zygote(("tests.titan.small", "torchtitan.config", "tests.ranks.jobs"))
    yield zygote
    zygote.close()
