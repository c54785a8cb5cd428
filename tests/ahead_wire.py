"""Play a wire that runs ahead, with gloo on CPUs: batches, device digests, and counts of what waits for the
device."""

import functools
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.state.serialization import digest
from checkpointless.transfer import exchange, transfer

#: How often each was called: ``digests`` (fetches of digests), ``control`` (all other waits of the host for a
#: device), ``batches`` and ``messages``.
counts: Counter[str] = Counter()
_WAITS = ("item", "tolist", "cpu")
_is_fetching = False


def install() -> None:
    """Play it in this process from now on, and count."""
    modules: Any
    for modules in (exchange, transfer):
        modules.runs_ahead = lambda: True
    for modules in (digest, transfer):
        modules.is_on_host = lambda tensor: False
    tensor: Any = torch.Tensor
    for name in _WAITS:
        setattr(tensor, name, _counting(getattr(tensor, name)))
    digests: Any = digest.PendingDigests
    digests.fetch = _fetching(digests.fetch)
    module: Any = dist
    module.batch_isend_irecv = _batching(module.batch_isend_irecv)


def _counting(method: Any) -> Any:
    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts["digests" if _is_fetching else "control"] += 1
        return method(*args, **kwargs)

    return counted


def _fetching(fetch: Any) -> Any:
    @functools.wraps(fetch)
    def fetched(pending: Any) -> Any:
        global _is_fetching
        _is_fetching = True
        try:
            return fetch(pending)
        finally:
            _is_fetching = False

    return fetched


def _batching(batch: Any) -> Any:
    @functools.wraps(batch)
    def batched(operations: Any) -> Any:
        counts["batches"] += 1
        counts["messages"] += len(operations)
        return batch(operations)

    return batched
