"""One rank of any side: `rank.py SIDE DIRECTORY STEPS SEED KINDS`; a seed's faults of these kinds come."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.trainers.model import RANKS, Training

KINDS = ("exception", "SIGKILL", "hang", "straggler", "planned", "node", "corrupted")
NODE_ENV = "BENCHMARK_NODE"
SAVE_EVERY = 10
SLOW_STEPS, SLOW_S = 6, 0.3
APART = 9  # steps at least from one fault to the next
_FIRST, _DRAWN = 15, 4
_EVERY = APART + _DRAWN - 1
STEPS = _FIRST + _EVERY * len(KINDS) + 10
FREES = timedelta(seconds=10)  # ranks that wait for a lost one in gloo; a real job needs more than its longest step
_LEAVES_S = 60.0  # until whoever announced that a node goes has ended its processes


@dataclass(frozen=True)
class Fault:
    """A fault of the schedule; ``rank`` is whose fault it is, unless it is a node's."""

    kind: str
    step: int
    rank: int


def schedule(seed: int) -> list[Fault]:
    """Draw the order of the kinds, their steps and their ranks."""
    dice = random.Random(f"head-to-head/{seed}")
    kinds = dice.sample(KINDS, len(KINDS))
    return [
        Fault(kind, _FIRST + _EVERY * place + dice.randrange(_DRAWN), dice.randrange(1, RANKS))
        for place, kind in enumerate(kinds)
    ]


class Disturbed(Training):
    """A rank with the faults of a schedule; which have happened is known from files, since processes die.

    Args:
        leave: what a rank does whose node is to leave, if not wait for its end.
    """

    def __init__(
        self, directory: Path, rank: int, faults: Sequence[Fault], leave: Callable[[], None] | None = None
    ) -> None:
        super().__init__(directory, rank, "none")
        self._directory, self._due, self._leave = directory, faults, leave

    def leaves(self, step: int) -> bool:
        """Whether a node is to leave before this step, as everybody knows, and has not yet."""
        return any(each.kind == "planned" and each.step == step and not self._has_come(each) for each in self._due)

    def begin(self, step: int, stays: bool) -> None:
        """Cause what comes before a step; with ``stays`` a rank goes on that is to leave as planned."""
        for each in self._due:
            first = os.environ[NODE_ENV] != "0" and os.environ.get("LOCAL_RANK", "0") == "0"
            goes = each.kind in ("planned", "node") and each.step == step and first and self._claim(each, step)
            if goes and not (stays and each.kind == "planned"):
                if self._leave is not None and each.kind == "planned":
                    self._leave()
                time.sleep(_LEAVES_S)
            if self.rank == each.rank and each.kind == "straggler" and 0 <= step - each.step < SLOW_STEPS:
                self._claim(each, step)
                time.sleep(SLOW_S)
            if self.rank == each.rank and each.kind == "corrupted" and each.step == step:
                self._flip_when_due(each)

    def _flip_when_due(self, fault: Fault) -> None:
        """Flip a bit of one gradient before it is reduced, once."""

        def flip(gradient: torch.Tensor) -> torch.Tensor:
            handle.remove()
            if not self._claim(fault, fault.step):
                return gradient
            wrong = gradient.clone()
            wrong.view(torch.int32)[0, 0] ^= 1 << 20
            return wrong

        handle = next(self.model.parameters()).register_hook(flip)

    def maybe_fail(self, step: int) -> None:
        """Cause what comes between forward and backward pass."""
        for each in self._due:
            if self.rank != each.rank or each.step != step or each.kind not in ("exception", "SIGKILL", "hang"):
                continue
            if not self._claim(each, step):
                continue
            if each.kind == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            while each.kind == "hang":
                time.sleep(1.0)
            raise RuntimeError("on purpose")

    def make(self, step: int, model: torch.nn.Module) -> None:
        """Make a step with all ranks, and what the schedule has for it."""
        self.begin(step, stays=False)
        loss = self.loss(model, step)
        self.maybe_fail(step)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.made(step, dist.get_world_size())

    def _has_come(self, fault: Fault) -> bool:
        return (self._directory / f"fired-{fault.kind}-{fault.step}").exists()

    def _claim(self, fault: Fault, step: int) -> bool:
        """Return whether this comes for the first time, and write it down."""
        with suppress(FileExistsError):
            (self._directory / f"fired-{fault.kind}-{step}").touch(exist_ok=False)
            self.marks.write("fault", kind=fault.kind, step=step, node=int(os.environ[NODE_ENV]))
            return True
        return False


def from_checkpoint(own: Disturbed, directory: Path, steps: int, alive: Callable[[], None]) -> None:
    """Train as torchrun starts it again after a fault, from the newest checkpoint."""
    checkpoint, done = directory / "last.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        own.model.load_state_dict(saved["model"])
        own.optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    model = DistributedDataParallel(own.model)

    def save(step: int) -> None:
        if own.rank == 0:
            state = {"model": own.model.state_dict(), "optimizer": own.optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)

    for step in range(done + 1, steps + 1):
        alive()
        if own.leaves(step):
            save(step - 1)
            dist.barrier()
        own.make(step, model)
        if step % SAVE_EVERY == 0:
            save(step)


def torchrun(directory: Path, steps: int, faults: Sequence[Fault]) -> None:
    """Train under torchrun."""
    dist.init_process_group("gloo", timeout=FREES)
    own = Disturbed(directory, dist.get_rank(), faults)
    from_checkpoint(own, directory, steps, lambda: None)
    own.end()
    dist.barrier()


def ft_launcher(directory: Path, steps: int, faults: Sequence[Fault]) -> None:
    """Train under nvidia-resiliency-ext's launcher, whose monitor gets a heartbeat per step."""
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest

    def leave() -> None:
        client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "planned"))
        raise SystemExit("this node leaves as planned")

    dist.init_process_group("gloo", timeout=FREES)
    own, client = Disturbed(directory, dist.get_rank(), faults, leave), RankMonitorClient()
    client.init_workload_monitoring()
    from_checkpoint(own, directory, steps, client.send_heartbeat)
    own.end()
    client.shutdown_workload_monitoring()
    dist.barrier()


def lm_resiliency(directory: Path, steps: int, faults: Sequence[Fault]) -> None:
    """Train under torchrun with lm-resiliency's copies in memory and on local disks, of each step."""
    from lm_resiliency import InMemoryCkptConfig, enable_resiliency

    dist.init_process_group("gloo", timeout=FREES)
    own = Disturbed(directory, dist.get_rank(), faults)
    model = DistributedDataParallel(own.model)
    folder, pairs = str(directory / f"copies-{own.rank}"), {"replication_jump": 2}  # with a rank of the other node
    kept = InMemoryCkptConfig(
        interval=1, disk_flush_interval=1, disk_folder=folder, run_id="1", pin_memory=False, **pairs
    )
    more = {"enable_detection": False, "group": dist.group.WORLD, "device": torch.device("cpu")}
    handle = enable_resiliency(model, own.optimizer, interval=1, checkpoint=kept, **more)
    for step in range(handle.step_count + 1, steps + 1):
        if own.leaves(step):
            handle.flush_for_restart()
        own.make(step, model)
    own.end()
    dist.barrier()


def torchft(directory: Path, steps: int, faults: Sequence[Fault]) -> None:
    """Train as one replica group of torchft, with the settings that `benchmarks/trainers` found to be quickest."""
    from torchft import DistributedDataParallel as FaultTolerant
    from torchft import Manager, Optimizer, ProcessGroupGloo

    own = Disturbed(directory, int(os.environ["REPLICA_GROUP_ID"]), faults)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=1)),
        min_replica_size=2,
        use_async_quorum=False,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"rank_{own.rank}",
        timeout=timedelta(seconds=30),
        init_sync=False,
    )
    model = FaultTolerant(manager, own.model)
    optimizer = Optimizer(manager, own.optimizer)
    (directory / f"ready-{own.rank}").touch()
    while len(list(directory.glob("ready-*"))) < RANKS:
        time.sleep(0.01)
    while manager.current_step() < steps:
        optimizer.zero_grad()
        step = manager.current_step() + 1
        own.begin(step, stays=False)
        loss = own.loss(model, step)
        own.maybe_fail(step)
        loss.backward()
        optimizer.step()
        if manager.current_step() >= step:
            own.made(manager.current_step(), manager.num_participants())
    own.end()
    manager.shutdown(wait=False)
    os._exit(0)  # its threads would keep the process


def checkpointless(directory: Path, steps: int, faults: Sequence[Fault], check_every: int | None = None) -> None:
    """Train in a block that is entered again after a fault; ``check_every``: how often gradients are checked."""
    from checkpointless import HPWrapper, PlainTraining

    @HPWrapper()
    def train() -> None:
        dist.init_process_group("gloo")
        own = Disturbed(directory, dist.get_rank(), faults)
        model = DistributedDataParallel(own.model)
        training = PlainTraining(modules=[model], optimizers=[own.optimizer], sdc_check_every=check_every)

        def compute(step: int) -> torch.Tensor:
            loss = own.loss(model, step)
            own.maybe_fail(step)
            loss.backward()
            return loss

        for step in training.steps(steps):
            own.begin(step, stays=True)
            loss = training.checked(partial(compute, step))
            training.update(loss.item())
            own.made(step, RANKS)
        own.end()
        dist.barrier()

    train()


def checked(directory: Path, steps: int, faults: Sequence[Fault]) -> None:
    """Train with checkpointless, with each step's gradients checked."""
    checkpointless(directory, steps, faults, check_every=1)


SIDES = (torchrun, ft_launcher, torchft, lm_resiliency, checkpointless, checked)

if __name__ == "__main__":
    _side, _directory, _steps, _seed, _kinds = sys.argv[1:]
    _faults = [each for each in schedule(int(_seed)) if each.kind in _kinds.split(",")]
    {each.__name__: each for each in SIDES}[_side](Path(_directory), int(_steps), _faults)
