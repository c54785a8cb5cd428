"""One rank under NVRx's in-process restart: `nvrx_side.py DIRECTORY FAULT PEERS`.

NVRx looks at the annotation of the parameter that is to be its wrapper: postponed annotations must not be on here.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import nvidia_resiliency_ext.inprocess as inprocess
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Marks
from benchmarks.reentry.block import Fault, Peers, block

STORE_PORT_ENV = "BENCHMARK_STORE_PORT"
COLLECTIVE_TIMEOUT_ENV = "BENCHMARK_COLLECTIVE_TIMEOUT_S"
_POLL = timedelta(seconds=0.05)


def main() -> None:
    """Start the block under the fastest settings that work."""
    directory, fault, peers = sys.argv[1:]
    rank = int(os.environ["RANK"])
    marks = Marks(Path(directory), rank)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ[STORE_PORT_ENV]),
        int(os.environ["WORLD_SIZE"]),
        is_master=rank == 0,
        multi_tenant=True,
    )

    @inprocess.Wrapper(
        # Not shorter: it waits on a store, which wakes it at once, and with torch 2.13 every eighth wait that runs
        # into a time-out of 50 ms takes 5 s.
        monitor_thread_interval=timedelta(seconds=1),
        monitor_process_interval=_POLL,
        heartbeat_interval=_POLL,
        progress_watchdog_interval=_POLL,
        last_call_wait=timedelta(0),
        # The other time-outs are for ranks that hang; with shorter ones nobody who is blocked gets free either.
    )
    def run(caller: inprocess.CallWrapper | None = None) -> None:
        assert caller is not None

        def connect() -> None:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(str(caller.iteration), store),
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                timeout=timedelta(seconds=float(os.environ[COLLECTIVE_TIMEOUT_ENV])),
            )

        block(connect, caller.iteration, marks, Fault(fault), Peers(peers))

    run()


if __name__ == "__main__":
    main()
