"""One replica group of one rank under torchft: `torchft_side.py DIRECTORY STEPS FAULT`.

It does what torchft's own `train_ddp.py` does. ``BENCHMARK_*`` variables say what differs between the settings.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport

from benchmarks.trainers.model import RANKS, Training

MIN_REPLICAS_ENV = "BENCHMARK_MIN_REPLICAS"
EXAMPLE_ENV = "BENCHMARK_AS_IN_THE_EXAMPLE"
_START_S = 120.0


def main() -> None:
    """Train until so many steps are committed."""
    logging.basicConfig(level=logging.INFO)
    directory, steps, fault = sys.argv[1:]
    rank = int(os.environ["REPLICA_GROUP_ID"])
    own = Training(Path(directory), rank, fault)
    example = os.environ[EXAMPLE_ENV] == "1"

    def load_state_dict(state: dict[str, object]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    def state_dict() -> dict[str, object]:
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    group = ProcessGroupGloo(timeout=timedelta(seconds=5 if example else 1))
    # The example moves the state through the group; without a transport torchft takes HTTP.
    transport = PGTransport(group, timeout=timedelta(seconds=10), device="cpu") if example else None
    manager = Manager(
        pg=group,
        min_replica_size=int(os.environ[MIN_REPLICAS_ENV]),
        use_async_quorum=example,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"train_ddp_{rank}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=transport,
        init_sync=example,  # the models are alike from the start
    )
    model = DistributedDataParallel(manager, own.model)
    optimizer = Optimizer(manager, own.optimizer)
    _begin_together(Path(directory), rank)
    while manager.current_step() < int(steps):
        optimizer.zero_grad()
        before = manager.current_step()
        loss = own.loss(model, before + 1)
        own.maybe_fail(before + 1)
        loss.backward()
        optimizer.step()
        if manager.current_step() > before:
            own.made(manager.current_step(), manager.num_participants())
        else:
            own.marks.write("not committed", step=before + 1)
    own.end()
    manager.shutdown(wait=False)
    os._exit(0)  # its threads would keep the process


def _begin_together(directory: Path, rank: int) -> None:
    """Wait until every rank has a manager, so that an undisturbed run has all of them from its first step."""
    (directory / f"ready-{rank}").touch()
    deadline = time.monotonic() + _START_S
    while not all((directory / f"ready-{each}").exists() for each in range(RANKS)):
        if time.monotonic() > deadline:
            raise TimeoutError("not every rank has come")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
