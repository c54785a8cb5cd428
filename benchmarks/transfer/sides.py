"""One rank of the transfer benchmark: rank 0 is filled, ranks 1 and 2 hold the state. Started by run.py."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.inprocess.communicators.helper_thread import run_in_helper_thread
from checkpointless.state.serialization.digest import MemoryChecksumManager
from checkpointless.transfer.tensor_entry import Key
from checkpointless.transfer.transfer import Fill, TransferReport, receive_state, send_state

RAW_BYTES = 256 * 1024 * 1024
LIMIT = timedelta(seconds=180)
Side = Callable[[], dict[str, Any]]


class Rank:
    """The state of this rank and how each side moves it.

    Args:
        small: how many tensors of 256 KiB.
        large: how many tensors of 100 MiB.
        memory_budget_bytes: of ``receive_state``.
    """

    def __init__(self, small: int, large: int, memory_budget_bytes: int) -> None:
        self.rank = dist.get_rank()
        self.memory_budget_bytes = memory_budget_bytes
        sizes = [64 * 1024] * small + [25 * 1024 * 1024] * large
        generator = torch.Generator().manual_seed(0)
        self.tensors: dict[Key, torch.Tensor] = {
            ("model", 0, f"tensor{index}"): torch.empty(size).uniform_(generator=generator)
            for index, size in enumerate(sizes)
        }
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.expected = MemoryChecksumManager().digest_all(self.tensors)
        self.http: Any = None
        self.pg: Any = None

    def sides(self, names: list[str]) -> dict[str, Side]:
        """Those of ``names``, in their order."""
        known: dict[str, Side] = {
            "raw": self.raw,
            "ours_1": lambda: self.ours((1,)),
            "ours_2": lambda: self.ours((1, 2)),
            "torchft_http": self.torchft_http,
            "torchft_pg": self.torchft_pg,
        }
        return {name: known[name] for name in names}

    def raw(self) -> dict[str, Any]:
        """As many bytes in messages of 256 MiB, from and into memory that has been touched."""
        if self.rank > 1:
            return {}
        left = self.nbytes
        while left > 0:
            message = self._raw_buffer[: min(left, RAW_BYTES)]
            if self.rank == 1:
                dist.send(message, 0)
            else:
                dist.recv(message, 1)
            left -= message.numel()
        return {}

    def prepare_raw(self) -> None:
        """Touch the buffer that :meth:`raw` uses."""
        self._raw_buffer = torch.ones(RAW_BYTES, dtype=torch.uint8)

    def ours(self, holders: tuple[int, ...]) -> dict[str, Any]:
        """``receive_state`` from ``holders``, interruptible as in a job."""
        if self.rank == 0:
            _, report = run_in_helper_thread(
                lambda: receive_state(
                    holders, lambda entries: self.tensors, memory_budget_bytes=self.memory_budget_bytes
                )
            )
            assert isinstance(report, TransferReport)
            return {"bytes": report.bytes, "digest": report.digest}
        if self.rank in holders:
            fill = Fill(0, holders.index(self.rank), len(holders))
            run_in_helper_thread(lambda: send_state(self.tensors, {}, [fill]))
        return {}

    def torchft_http(self) -> dict[str, Any]:
        """torchft's HTTPTransport with 10 chunks, as its own benchmark uses it."""
        from torchft.checkpointing.http_transport import HTTPTransport

        if self.http is None:
            self.http = HTTPTransport(timeout=LIMIT, num_chunks=10)
            address = [self.http.metadata()]
            dist.broadcast_object_list(address, src=1)
            self._address = address[0]
        if self.rank == 1:
            self.http.send_checkpoint([0], step=1, state_dict={"user": list(self.tensors.values())}, timeout=LIMIT)
        dist.barrier()
        if self.rank == 0:
            received = self.http.recv_checkpoint(src_rank=1, metadata=self._address, step=1, timeout=LIMIT)
            for mine, theirs in zip(self.tensors.values(), received["user"]):
                mine.set_(theirs)
        dist.barrier()
        if self.rank == 1:
            self.http.disallow_checkpoint()
        return {}

    def torchft_pg(self) -> dict[str, Any]:
        """torchft's PGTransport over gloo, into the tensors that are there."""
        from torchft.checkpointing.pg_transport import PGTransport
        from torchft.process_group import ProcessGroupGloo

        if self.rank > 1:
            return {}
        if self.pg is None:
            self.pg = ProcessGroupGloo(timeout=LIMIT)
            store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}/torchft"
            self.pg.configure(store_addr=store, replica_id="0", rank=self.rank, world_size=2)
        state = {str(key): tensor for key, tensor in self.tensors.items()}
        transport = PGTransport(self.pg, timeout=LIMIT, device=torch.device("cpu"), state_dict=lambda: state)
        if self.rank == 1:
            transport.send_checkpoint([0], step=1, state_dict=state, timeout=LIMIT)
        else:
            transport.recv_checkpoint(src_rank=1, metadata=transport.metadata(), step=1, timeout=LIMIT)
        return {}

    def forget(self) -> None:
        """On the rank to fill: lose everything, keeping the storage, as a model that was built anew."""
        if self.rank == 0:
            for tensor in self.tensors.values():
                tensor.zero_()

    def check(self, name: str) -> None:
        """The rank that was filled has every bit.

        Raises:
            RuntimeError: it has not.
        """
        if self.rank == 0 and name != "raw" and MemoryChecksumManager().digest_all(self.tensors) != self.expected:
            raise RuntimeError(f"{name}: what arrived is not what was sent")


def peak_bytes() -> int:
    """The most memory that this process had resident since :func:`reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not report the peak of resident memory")


def reset_peak() -> int:
    """Begin a new peak. Returns what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def main() -> None:
    """Make every side's transfer, ``repeats`` times, in turn."""
    settings = json.loads(sys.argv[1])
    dist.init_process_group("gloo", timeout=LIMIT)
    torch.set_num_threads(1)
    rank = Rank(settings["small"], settings["large"], settings["memory_budget_bytes"])
    rank.prepare_raw()
    sides = rank.sides(settings["sides"])
    for repeat in range(-1, settings["repeats"]):  # the first round opens connections and is not counted
        for name, side in sides.items():
            rank.forget()
            dist.barrier()
            before = reset_peak()
            began_s, used_s = time.monotonic(), time.process_time()
            more = side()
            seconds, used_s = time.monotonic() - began_s, time.process_time() - used_s
            extra = peak_bytes() - before
            dist.barrier()
            rank.check(name)
            extras: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(extras, (extra, used_s))
            if rank.rank == 0 and repeat >= 0:
                line = {
                    "side": name,
                    "repeat": repeat,
                    "seconds": seconds,
                    "gb_per_s": rank.nbytes / seconds / 1e9,
                    "extra_bytes": [extra for extra, _ in extras],
                    "processor_s": [used_s for _, used_s in extras],
                    **more,
                }
                print(json.dumps(line), flush=True)
    dist.barrier()
    os._exit(0)  # torchft's threads would keep the process


if __name__ == "__main__":
    main()
