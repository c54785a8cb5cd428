"""Test when a fit takes the model that was kept."""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("nemo.lightning", reason="needs NeMo")

from checkpointless.state.rng import RngStates
from checkpointless.strategies import warm_start
from checkpointless.strategies.warm_start import WarmStart

pytestmark = pytest.mark.nemo


class Kept:
    """Stands in for a kept model."""

    def __init__(
        self, mismatch: str | None = None, unfit: str | None = None, builds_together: bool = False
    ) -> None:
        self.streams = RngStates.capture().without_sources(), RngStates.capture()
        self.builds_together = builds_together
        self._mismatch, self._unfit = mismatch, unfit

    def mismatch(self, plans: Mapping[str, object]) -> str | None:
        return self._mismatch

    def unfit(self) -> str | None:
        return self._unfit


class Job:
    """What the ranks around a fit say, and what this one tells."""

    def __init__(self) -> None:
        self.obstacle: str | None = None
        self.everyone = True
        self.told: list[Mapping[str, Any]] = []

    def start(self, kept: Kept | None, fit: int = 1) -> Any:
        """Set up the fit after the first one of the block, for which a model may have been kept."""
        strategy: Any = SimpleNamespace(lightning_module=SimpleNamespace())
        start: Any = WarmStart(strategy)
        manager: Any = SimpleNamespace(kept=None if kept is None else (fit, kept), fits=SimpleNamespace(number=0))
        start.agree(manager)
        assert (manager.kept is not None) == start.is_warm or fit != 1
        return start


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job()
    random.seed(3)
    monkeypatch.setattr(warm_start, "_obstacle", lambda strategy: made.obstacle)
    monkeypatch.setattr(warm_start, "_plans", lambda strategy: {})
    monkeypatch.setattr(warm_start, "true_on_all", lambda mine: mine and made.everyone)
    monkeypatch.setattr(warm_start, "emit_event", lambda name, **fields: made.told.append(fields))
    return made


def test_ranks_that_build_together_do_so_if_one_does(job: Job) -> None:
    assert job.start(Kept(builds_together=True)).is_warm
    job.everyone = False
    assert not job.start(Kept(builds_together=True)).is_warm
    assert "another rank builds its model" in job.told[0]["reason"]


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        ({"mismatch": "width of the model is another one"}, "width of the model is another one"),
        ({"unfit": "the optimizer has other hooks"}, "the optimizer has other hooks"),
    ],
)
def test_what_is_not_the_same_is_built_anew(job: Job, kept: dict[str, str], reason: str) -> None:
    assert not job.start(Kept(**kept)).is_warm  # type: ignore[arg-type]
    assert job.told == [{"kept": False, "reason": reason}]


def test_what_cannot_be_given_is_built_anew(job: Job) -> None:
    kept = Kept()
    job.obstacle = "the model was built before the fit"
    assert not job.start(kept).is_warm
    assert job.told == [{"kept": False, "reason": job.obstacle}]


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(1)], ids=["python", "torch"])
def test_other_random_numbers_before_a_model_is_built_give_another_model(job: Job, draw: Any) -> None:
    kept = Kept()
    draw()
    assert not job.start(kept).is_warm
    assert job.told == [{"kept": False, "reason": "random numbers were drawn otherwise before"}]


def test_a_module_that_another_thread_copies_meanwhile_is_none_of_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nemo.lightning import io

    start: Any = object.__new__(WarmStart)
    start._obstacle, start._kept = None, None
    monkeypatch.setattr(io, "reinit", lambda module: SimpleNamespace(of=module))
    with start._stages(), ThreadPoolExecutor(1) as pool:
        mine, others = io.reinit("mine"), pool.submit(io.reinit, "others").result()
    assert (mine.of, others.of) == ("mine", "others")
    assert hasattr(mine, "configure_model")
    assert not hasattr(others, "configure_model")
