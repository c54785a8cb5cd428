"""Test how values that accumulate over an epoch are taken, kept as a rank's own, and put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torchmetrics import CatMetric, MeanMetric, MetricTracker, MinMaxMetric

from checkpointless.integrations.lightning.boundary import epoch_metrics
from checkpointless.integrations.lightning.boundary.epoch_metrics import OWN_BYTES, Accumulated, _own_part
from checkpointless.state.serialization import state_tree

pytestmark = pytest.mark.nemo


def taken(trainer: Any) -> dict[str, Any]:
    return Accumulated(trainer)()


class Module(torch.nn.Module):
    """Has a metric, one in a container, and two that wrap others."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.more = torch.nn.ModuleDict({"all": CatMetric()})
        self.extremes = MinMaxMetric(MeanMetric())
        self.history = MetricTracker(MeanMetric(), maximize=True)


def trainer_of() -> Any:
    trainer: Any = SimpleNamespace(
        lightning_module=Module(),
        strategy=SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda value, *_, **__: value),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_results=_ResultCollection(training=True))),
        _logger_connector=SimpleNamespace(_first_loop_iter=None, _current_fx=None),
    )
    epoch_metrics.make_results_resumable(trainer)
    return trainer


def log(trainer: Any, value: float, group: Any = None) -> None:
    module, connector = trainer.lightning_module, trainer._logger_connector
    connector._first_loop_iter = connector._first_loop_iter is None
    connector._current_fx = "training_step"
    module.mean.update(value)
    module.more["all"].update(value)
    module.extremes.update(value)
    module.extremes.compute()
    module.history.increment()
    module.history.update(value)
    results = trainer.fit_loop.epoch_loop._results
    options = {"on_epoch": True, "sync_dist_fn": trainer.strategy.reduce, "batch_size": 2}
    for reduction in ("mean", "max", "sum"):
        results.log("training_step", reduction, torch.tensor(value), reduce_fx=reduction, on_step=True, **options)
    results.log("training_step", "shared", torch.tensor(value), sync_dist=True, sync_dist_group=group, **options)
    results.log("training_step", "object", module.mean, metric_attribute="mean", **options)
    results.log("training_step", "step", torch.tensor(value), on_step=True, on_epoch=False)


def ended(trainer: Any) -> dict[str, Any]:
    found = trainer.fit_loop.epoch_loop._results.metrics(on_step=False)["callback"]
    module = trainer.lightning_module
    return {
        **found,
        "all": module.more["all"].compute().tolist(),
        "extremes": module.extremes.compute(),
        "history": module.history.compute_all().tolist(),
    }


def test_what_is_put_back_goes_on_as_if_nothing_had_been() -> None:
    calm, broken, resumed = trainer_of(), trainer_of(), trainer_of()
    for value in (3.0, 1.0, 7.0):
        log(calm, value)
    for value in (3.0, 1.0):
        log(broken, value, group="old")
    kept = taken(broken)
    log(broken, 100.0, group="old")
    state_tree.check(kept)
    Accumulated.put(resumed, state_tree.loads(state_tree.dumps(kept)))
    assert resumed._logger_connector._first_loop_iter is False
    log(resumed, 7.0, group="new")
    assert ended(resumed) == ended(calm)


def test_a_peers_values_are_not_taken_for_ones_own() -> None:
    mine, peer, resumed = trainer_of(), trainer_of(), trainer_of()
    log(mine, 2.0)
    log(peer, 50.0)
    peer.fit_loop.epoch_loop._results.log("training_step", "of rank 0", torch.tensor(1.0), batch_size=1)
    own = _own_part(taken(mine))
    assert own is not None
    Accumulated.put(resumed, Accumulated.with_own(taken(peer), state_tree.loads(state_tree.dumps(own))))
    assert ended(resumed) == ended(mine)


def test_what_is_too_large_to_outlive_its_process_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_metrics, "_warned", False)
    trainer = trainer_of()
    trainer.lightning_module.more["all"].update(torch.zeros(OWN_BYTES))
    kept = taken(trainer)
    assert [_own_part(kept), _own_part(kept)] == [None, None]
    assert ["if its process is lost" in each for each in caplog.messages] == [True]
    caplog.clear()
    assert Accumulated.with_own(kept, None)["metrics"].keys() == kept["metrics"].keys()
    Accumulated.warn_if_lost(kept, _own_part(taken(trainer_of())))
    Accumulated.warn_if_lost(kept, None)
    assert ["is lost with its process" in each for each in caplog.messages] == [True]
