"""One rank under NVRx's in-process restart, with a checkpoint per step: `nvrx_side.py DIRECTORY STEPS FAULT`.

NVRx looks at the annotation of the parameter that is to be its wrapper: postponed annotations must not be on here.
"""

import os
import sys
from datetime import timedelta

import nvidia_resiliency_ext.inprocess as inprocess
import torch.distributed as dist

from benchmarks.trainers.checkpoint_side import train

# What frees ranks that wait for a lost one in gloo. A real job needs more than its longest step.
COLLECTIVES = timedelta(seconds=10)
STORE_PORT_ENV = "BENCHMARK_STORE_PORT"
_POLL = timedelta(seconds=0.05)


def main() -> None:
    """Train in a block that is entered again after a fault, from the checkpoint."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ[STORE_PORT_ENV]),
        int(os.environ["WORLD_SIZE"]),
        is_master=os.environ["RANK"] == "0",
        multi_tenant=True,
    )

    wrapper = inprocess.Wrapper(
        monitor_thread_interval=timedelta(seconds=1),
        monitor_process_interval=_POLL,
        heartbeat_interval=_POLL,
        progress_watchdog_interval=_POLL,
        last_call_wait=timedelta(0),
    )
    wrapper.restart_health_check = None  # of GPUs, which fails where there are none

    @wrapper
    def run(caller: inprocess.CallWrapper | None = None) -> None:
        assert caller is not None
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(caller.iteration), store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=COLLECTIVES,
        )
        train(*sys.argv[1:])

    run()


if __name__ == "__main__":
    main()
