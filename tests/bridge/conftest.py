"""Tests that need Megatron-Bridge: ``make test-bridge`` runs them, in an environment of their own."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from tests.ranks.conftest import attempt, nemo_zygote, short_folder, trainings, trainings_of  # noqa: F401

try:
    version("megatron-bridge")
    # Megatron-LM is in the wheels of Megatron-core from 0.19 on.
    collect_ignore_glob = [] if find_spec("megatron.training") else ["test_megatron_lm.py"]
except PackageNotFoundError:  # where NeMo is, Bridge cannot be: they want different versions of Megatron-core
    collect_ignore_glob = ["test_*.py"]
