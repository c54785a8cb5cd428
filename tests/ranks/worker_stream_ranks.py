"""Provide what ranks do in ``test_worker_streams.py``."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.utils.data import DataLoader, IterableDataset

from checkpointless.integrations.lightning import recoverable_strategy
from checkpointless.integrations.lightning.recoverable_strategy import _repeat_worker_draws, _WorkerSeed
from checkpointless.state.rng import RngStates


class Positioned(DataLoader[int]):
    """Says where it stands."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        pass


class Lines(IterableDataset[int]):
    """Stands in for a dataset that can only be iterated over."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def agree(keeps: list[int | None]) -> int | None:
    """Agree on a seed where rank ``r`` was seeded with ``100 + r`` and keeps ``keeps[r]`` from before a fault."""
    dist.init_process_group("gloo")
    torch.manual_seed(100 + dist.get_rank())
    seed = _WorkerSeed()
    seed.value = keeps[dist.get_rank()]
    states = RngStates.from_bytes(RngStates.capture().to_bytes())
    seed.agree(states)
    return seed.value


def loaders_of_a_trainer() -> dict[str, Any]:
    """Return how loaders are prepared in the middle of an epoch, and what is said about those that cannot be."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    recoverable_strategy.logger.addHandler(handler)
    prepared, rank = {}, parallel_state.get_data_parallel_rank()
    for stage in ("training", "evaluation"):
        loader: DataLoader[int] = DataLoader(range(4), num_workers=1)  # type: ignore[arg-type]
        _repeat_worker_draws(loader, 7, _trainer(stage == "training"), rank)
        streams: Any = loader.worker_init_fn
        prepared[stage] = [*streams.key, streams.place().epoch, streams.place().batch]
    for _ in range(2):
        _repeat_worker_draws(Positioned(Lines(), num_workers=1), 7, _trainer(True), rank)
        again: Any = DataLoader(Lines(), num_workers=1)  # it is gone through from its beginning: nothing is said
        _repeat_worker_draws(again, 7, _trainer(True), rank)
        place = again.worker_init_fn.place()
        prepared["again"] = [place.epoch, place.batch]
        _repeat_worker_draws(DataLoader(Lines()), 7, _trainer(True), rank)
        _repeat_worker_draws(iter(()), 7, _trainer(True), rank)
    return {**prepared, "said": said}


def _trainer(training: bool) -> Any:
    progress = SimpleNamespace(current=SimpleNamespace(ready=3))
    return SimpleNamespace(
        training=training,
        current_epoch=2,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        strategy=SimpleNamespace(data_sampler=SimpleNamespace(num_microbatches=4)),
    )
