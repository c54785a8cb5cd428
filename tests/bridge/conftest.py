"""Tests that need Megatron-Bridge: ``make test-bridge`` runs them, in an environment of their own."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import pytest

from tests.ranks.nemo_zygote import Zygote

try:
    version("megatron-bridge")
    # Megatron-LM is in the wheels of Megatron-core from 0.19 on.
    collect_ignore_glob = [] if find_spec("megatron.training") else ["test_megatron_lm.py"]
except PackageNotFoundError:  # where NeMo is, Bridge cannot be: they want different versions of Megatron-core
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def bridge_zygote() -> Iterator[Zygote]:
    """Yield a process that has imported Bridge on the CPU platform and forks ranks in milliseconds."""
    zygote = Zygote(("checkpointless.integrations.megatron_bridge",))
    yield zygote
    zygote.close()
