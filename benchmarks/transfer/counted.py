"""One rank of the counts: rank 0 is filled, the others hold the state. Started by counts.py.

It also runs against the sources of before, whose wire could not be played: there the digests of a device are put in
their place here, and messages are launched one by one.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.transfer import transfer as staging
from checkpointless.transfer import transfer as transfer_module
from checkpointless.transfer.transfer import Fill, receive_state, send_state


def main() -> None:
    """Make one fill, and write what was counted."""
    settings = json.loads(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors: dict[tuple[str | int, ...], torch.Tensor] = {
        ("model", index): torch.full((nbytes // 4,), float(index))
        for index, nbytes in enumerate([settings["small_bytes"]] * settings["small"] + [settings["large_bytes"]])
    }
    counts = _of_before() if settings["before"] else _of_now()
    launches = _count_launches()
    seconds = 0.0
    if rank == 0:
        room = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        _, report = receive_state(range(1, world), lambda entries: room)
        seconds = report.seconds
    else:
        send_state(tensors, {}, [Fill(0, rank - 1, world - 1)])
    found = {
        "rank": rank,
        "digests": counts["digests"],
        "control": counts["control"],
        "messages": launches["messages"],
        "launches": counts["batches"] or launches["messages"],
        "seconds": seconds,
    }
    if rank == 0 and not all(torch.equal(room[key], tensor) for key, tensor in tensors.items()):
        raise RuntimeError("what arrived is not what was sent")
    dist.barrier()
    print(json.dumps(found), flush=True)


def _of_now() -> Counter[str]:
    """Play a wire that runs ahead."""
    ahead_wire = importlib.import_module("tests.ahead_wire")
    ahead_wire.install()
    counts: Counter[str] = ahead_wire.counts
    return counts


def _of_before() -> Counter[str]:
    """Put the digests of a device into the sources of before, and count."""
    checksum = importlib.import_module("checkpointless.state.serialization.checksum")
    counts: Counter[str] = Counter()
    fetching = [False]

    def digest(flat: torch.Tensor) -> int:
        fetching[0] = True
        try:
            return int(checksum._digest_on_device(flat))
        finally:
            fetching[0] = False

    modules: Any
    transfer_module_of_before: Any = transfer_module
    transfer_module_of_before.digest_bytes = digest
    modules = staging
    modules.digest_parts = lambda parts: digest(torch.cat(list(parts)))
    tensor: Any = torch.Tensor

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts["digests" if fetching[0] else "control"] += 1
            return method(*args, **kwargs)

        return counted

    for name in ("item", "tolist", "cpu"):
        setattr(tensor, name, counting(getattr(tensor, name)))
    return counts


def _count_launches() -> Counter[str]:
    counts: Counter[str] = Counter()
    group: Any = dist.ProcessGroup

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts["messages"] += 1
            return method(*args, **kwargs)

        return counted

    group.send, group.recv = counting(group.send), counting(group.recv)
    return counts


if __name__ == "__main__":
    main()
