"""How a loop of one's own with Megatron's optimizer is begun; tests/ranks/test_megatron_loop.py has such loops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.nemo


def test_what_is_missing_is_said() -> None:
    from checkpointless.integrations.megatron.training import MegatronTraining

    with pytest.raises(ValueError, match="no block is running"):
        MegatronTraining()
    call: Any = SimpleNamespace()
    with pytest.raises(ValueError, match="give the chunks and the optimizer"):
        MegatronTraining(call)
