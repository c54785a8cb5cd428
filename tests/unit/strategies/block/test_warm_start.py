"""Test what is given back where NeMo sets up a model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.nemo


def test_a_module_that_another_thread_copies_meanwhile_is_none_of_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nemo.lightning import io

    from checkpointless.strategies.block.warm_start import WarmStart

    start: Any = object.__new__(WarmStart)
    start._obstacle, start._kept = None, None
    monkeypatch.setattr(io, "reinit", lambda module: SimpleNamespace(of=module))
    with start._stages(), ThreadPoolExecutor(1) as pool:
        mine, others = io.reinit("mine"), pool.submit(io.reinit, "others").result()
    assert (mine.of, others.of) == ("mine", "others")
    assert hasattr(mine, "configure_model")
    assert not hasattr(others, "configure_model")
