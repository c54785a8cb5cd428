"""Takes what Lightning and torchmetrics accumulate over an epoch, and puts it back.

Only the rank itself has it until the epoch ends, so it is kept with the rank's random streams, which outlive its
process; a peer's is taken only if it is too large for that.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torchmetrics import Metric, MetricTracker
from typing_extensions import override

from checkpointless.integrations.compat.lightning import Metadata, ResultCollection, ResultMetric, Sync
from checkpointless.state.serialization.state_tree import Later

logger = logging.getLogger(__name__)

#: How much of a rank's metrics is kept outside of its process at most, in bytes.
OWN_BYTES = 128 * 1024

_MORE_BYTES = 1024  # the limit for a tensor that is not a state of its metric

_PLAIN = (bool, int, float, str, type(None))
_REDUCTIONS = {
    f"{each.__module__}.{each.__name__}": each
    for each in (torch.mean, torch.sum, torch.max, torch.min, sum, max, min)
}
_warned = False


class _Bare(Metric):
    def update(self) -> None: ...

    def compute(self) -> None: ...


_OF_ANY = frozenset(vars(_Bare()))  # attributes that every metric has


class _ResumableResults(ResultCollection):
    """Lightning's collection of results, which can resume with entries that were put back."""

    put_back: set[str]  # the keys of the entries that were put back and not logged since
    about: dict[str, dict[str, Any]]  # by key, how each entry is logged, as plain data that is not changed later
    is_paused: bool

    def entries(self) -> list[tuple[str, ResultMetric, dict[str, Any]]]:
        for key in self.keys() - self.about.keys():
            self.about[key] = _about(self[key])
        return [(key, metric, self.about[key]) for key, metric in self.items()]

    @override
    def log(self, fx: str, name: str, value: Any, *args: Any, **options: Any) -> None:
        if self.is_paused:
            return
        key = f"{fx}.{name}"
        if key in self.put_back:  # the process group that it is reduced over is new
            self.put_back.discard(key)
            sync = self[key].meta.sync
            sync.fn = options.get("sync_dist_fn", Sync.no_op)
            sync.group = options.get("sync_dist_group")
        super().log(fx, name, value, *args, **options)


def make_results_resumable(trainer: pl.Trainer) -> None:
    """Turn the training results of ``trainer`` into :class:`_ResumableResults`, in place."""
    results: Any = trainer.fit_loop.epoch_loop._results
    results.__class__ = _ResumableResults
    results.put_back, results.about, results.is_paused = set(), {}, False
    _watch_modules()


# --- a pass that is run once more ---------------------------------------------------------------------------------


@contextmanager
def unseen(trainer: pl.Trainer) -> Iterator[None]:
    """Have nothing logged in the context, and no callback called."""
    results: Any = trainer.fit_loop.epoch_loop._results
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    present, callbacks[:], results.is_paused = list(callbacks), [], True
    try:
        yield
    finally:
        callbacks[:], results.is_paused = present, False


def keep_metrics(trainer: pl.Trainer) -> Callable[[], None]:
    """Take the metrics of a trainer's module; return what puts them back."""
    taken = [(each, _take_metric(each)) for _, each in _metrics_of(trainer) if isinstance(each, Metric)]

    def put_back() -> None:
        for metric, entry in taken:
            _put_metric(metric, entry)

    return put_back


# --- taken --------------------------------------------------------------------------------------------------------


class Accumulated(Later[dict[str, Any]]):
    """What was logged and accumulated in this epoch until now."""

    __slots__ = ("_has_own",)

    def __init__(self, trainer: pl.Trainer) -> None:
        connector = trainer._logger_connector
        results: Any = trainer.fit_loop.epoch_loop._results
        taken = {key: _take_result(metric, about) for key, metric, about in results.entries()}
        metrics: dict[str, Any] = {}
        tracked: dict[str, int] = {}
        for name, each in _metrics_of(trainer):
            if isinstance(each, Metric):
                metrics[name] = _take_metric(each)
            else:
                tracked[name] = len(each)
        first, fx = connector._first_loop_iter, connector._current_fx
        self._has_own = bool(metrics) or any(map(_accumulates, taken.values()))

        super().__init__(
            lambda: {"results": taken, "metrics": metrics, "tracked": tracked, "first": first, "fx": fx}
        )

    def own(self) -> dict[str, Any] | None:
        """Return the part that this rank alone has; None if it is too large to be kept outside of the process."""
        return _own_part(self()) if self._has_own else {}

    @staticmethod
    def with_own(kept: Mapping[str, Any], own: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return ``kept``, in its order (some are reduced over ranks in turn), with what this rank alone has."""
        if own is None:
            metrics = {name: {**entry, "more": {}} for name, entry in kept["metrics"].items()}
            return {**kept, "metrics": metrics}
        mine = own.get("results", {})
        results = {key: entry for key, entry in kept["results"].items() if key in mine or not _accumulates(entry)}
        return {**kept, "results": {**results, **mine}, "metrics": own.get("metrics", {})}

    @staticmethod
    def warn_if_lost(kept: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Warn if something was accumulated and this rank's part of it, ``own``, is lost."""
        if own is None and (kept["metrics"] or any(map(_accumulates, kept["results"].values()))):
            logger.warning(
                "what this rank had accumulated of the metrics of this epoch is lost with its process: it goes on "
                "with that of a peer, and what they come to is wrong in this epoch"
            )

    @staticmethod
    def put(trainer: pl.Trainer, kept: Mapping[str, Any]) -> None:
        connector: Any = trainer._logger_connector
        results: Any = trainer.fit_loop.epoch_loop._results
        for name, tracker in _parts_of(trainer, MetricTracker):
            _put_size(tracker, kept["tracked"].get(name, len(tracker)))
        for name, metric in _parts_of(trainer, Metric):
            if name in kept["metrics"]:
                _put_metric(metric, kept["metrics"][name])
        results.clear()
        for key, entry in kept["results"].items():
            result = _made_result(trainer, entry)
            if result is not None:
                results[key] = result
        results.put_back = set(results)
        results.about = {key: kept["results"][key]["about"] for key in results}
        connector._first_loop_iter = kept["first"]
        connector._current_fx = kept["fx"]


def _take_result(metric: ResultMetric, about: dict[str, Any]) -> dict[str, Any]:
    """Take an entry as it is now: Lightning replaces its value and cache, but sums a size up in place."""
    values = vars(metric)
    taken = {
        "about": about,
        "values": {},
        "logged": None,
        "count": values["_update_count"],
        "has_reset": values["has_reset"],
    }
    if about["is_tensor"]:
        value = values["value"]
        taken["logged"] = values["_forward_cache"]
        taken["values"] = {
            "value": value.detach() if value.requires_grad and value is not taken["logged"] else value
        }
        if "cumulated_batch_size" in values:
            taken["values"]["cumulated_batch_size"] = values["cumulated_batch_size"].detach().clone()
    return taken


def _about(metric: ResultMetric) -> dict[str, Any]:
    """Return what stays the same about a result as long as it is logged in the same way."""
    meta = metric.meta
    return {
        "meta": {name: value for name, value in vars(meta).items() if type(value) in _PLAIN},
        "reduce": f"{meta.reduce_fx.__module__}.{meta.reduce_fx.__name__}",
        "sync": [meta.sync.should, meta.sync.rank_zero_only, meta.sync.op, meta.sync.group is not None],
        "is_tensor": metric.is_tensor,
    }


def _take_metric(metric: Metric) -> dict[str, Any]:
    cache = metric._forward_cache
    return {
        "states": {name: _kept(getattr(metric, name)) for name in metric._defaults},
        "logged": _kept(cache) if isinstance(cache, torch.Tensor) else None,
        "count": metric._update_count,
        "more": {
            name: _kept(value)
            for name, value in vars(metric).items()
            if name not in _OF_ANY and name not in metric._defaults and (type(value) in _PLAIN or _is_small(value))
        },
    }


def _kept(value: Any) -> Any:
    """Return a copy of ``value``. Of a list only the list is copied, because metrics append to it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if not isinstance(value, list):
        return value
    return [each.detach() if isinstance(each, torch.Tensor) else each for each in value]


def _is_small(value: Any) -> bool:
    """Return whether ``value`` is a tensor that a metric keeps results in, not a table that it computes with."""
    return type(value) is torch.Tensor and value.layout is torch.strided and value.nbytes <= _MORE_BYTES


def _parts_of(trainer: Any, kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules of ``kind`` in a trainer's module, by name; what Megatron built is not searched."""
    module = trainer.lightning_module
    built = "module" if hasattr(trainer.strategy, "megatron_parallel") else None
    if module._modules.keys() == {built}:
        return
    for name, child in module.named_children():
        if name != built:
            for path, each in child.named_modules(prefix=name):
                if isinstance(each, kind):
                    yield path, each


_FOUND = "_checkpointless_metrics"
_registered = 0  # how many modules were made parts of others in this process


def _count_registration(*unused: object) -> None:
    global _registered
    _registered += 1


@functools.cache
def _watch_modules() -> None:
    """Count from now on how many modules are made parts of others: only then metrics are searched for again."""
    register_module_module_registration_hook(_count_registration)


def _metrics_of(trainer: Any) -> list[tuple[str, Any]]:
    results = trainer.fit_loop.epoch_loop._results
    registered, found = vars(results).get(_FOUND, (-1, []))
    if registered != _registered:
        registered = _registered
        found = list(_parts_of(trainer, (Metric, MetricTracker)))
        setattr(results, _FOUND, (registered, found))
    return found


# --- what no peer has ---------------------------------------------------------------------------------------------


def _own_part(kept: Mapping[str, Any]) -> dict[str, Any] | None:
    results = {key: entry for key, entry in kept["results"].items() if _accumulates(entry)}
    if not results and not kept["metrics"]:
        return {}
    found = {"results": results, "metrics": kept["metrics"]}
    size = sum(_nbytes(entry["values"]) for entry in results.values())
    size += sum(_nbytes({**entry["more"], **entry["states"]}) for entry in kept["metrics"].values())
    if size <= OWN_BYTES:
        return found
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "the metrics that this rank accumulates over an epoch have %d bytes, over %d: if its process is lost, "
            "it goes on with those of a peer, and what they come to is wrong in that epoch; keep smaller states",
            size,
            OWN_BYTES,
        )
    return None


def _accumulates(entry: Mapping[str, Any]) -> bool:
    return bool(entry["about"]["meta"]["on_epoch"])


def _nbytes(states: Mapping[str, Any]) -> int:
    tensors = [each for value in states.values() for each in (value if isinstance(value, list) else [value])]
    return sum(getattr(tensor, "nbytes", 0) + 100 for tensor in tensors) + 500


# --- put back -----------------------------------------------------------------------------------------------------


def _put_size(tracker: MetricTracker, size: int) -> None:
    """Make a tracker hold as many metrics as it did, to which each step or epoch has added one."""
    while len(tracker) < size:
        tracker.increment()
    while len(tracker) > size:  # a module list would rename the metrics that it keeps
        tracker._modules.popitem()
    tracker._increment_called = size > 1  # the others are copies of the first


def _put_metric(metric: Metric, entry: Mapping[str, Any]) -> None:
    device = metric.device
    for name, value in entry["more"].items():
        now = getattr(metric, name, None)  # only states move with their metric
        setattr(metric, name, _moved(value, now.device if isinstance(now, torch.Tensor) else device))
    for name, value in entry["states"].items():
        setattr(metric, name, _moved(value, device))
    metric._update_count = entry["count"]
    metric._forward_cache = _moved(entry["logged"], device)
    metric._computed = None


def _made_result(trainer: pl.Trainer, entry: Mapping[str, Any]) -> ResultMetric | None:
    about = entry["about"]
    should, rank_zero_only, op, has_group = about["sync"]
    meta = Metadata(**about["meta"], reduce_fx=_REDUCTIONS[about["reduce"]])
    meta.sync = Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only, _op=op)
    result = ResultMetric(meta, about["is_tensor"])
    device = trainer.strategy.root_device
    if about["is_tensor"]:
        for name, value in entry["values"].items():
            setattr(result, name, _moved(value, device))
        result._forward_cache = _moved(entry["logged"], device)
    else:
        try:
            metric = operator.attrgetter(meta.metric_attribute or "")(trainer.lightning_module)
        except AttributeError:
            logger.warning("the metric %s is no longer an attribute of the module", meta.metric_attribute)
            return None
        result.value = metric
        result._forward_cache = metric._forward_cache
    result._update_count = entry["count"]
    # Its process group is gone; until it is logged again it cannot be reduced.
    result.has_reset = entry["has_reset"] or has_group
    return result


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    return [each.to(device) for each in value] if isinstance(value, list) else value
