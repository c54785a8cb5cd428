"""A callback that times, on the living objects of a training, what checkpointless adds to a step."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from lightning.pytorch.callbacks import Callback

from checkpointless.state.port import SnapshotPoint

SEPARATOR = " > "
_AFTERWARDS = 110
_WARM_UP = 10


class Part(Enum):
    """Of what a step does, what checkpointless adds."""

    STREAMS = "random streams, taken and put on the board (twice a step)"
    REPLICATION = "random streams, to another rank"
    STATE = "the state of the moment: callbacks, loops, metrics, buffers"
    REST = "the rest: callback, guard, lock, board"
    VOTE = "vote: waiting for the slowest rank"
    WAITS = "waits for gloo in turns (only without CUDA)"
    NOTHING = "the stopwatch itself, for a call of nothing"


# What is timed. Time in a call of the last group belongs to the training: it would be spent without checkpointless.
PART_OF: dict[str, Part | None] = {
    "CheckpointlessCallback.on_train_batch_start": Part.REST,
    "CheckpointlessCallback.on_train_batch_end": Part.REST,
    "strategy.reached": Part.REST,
    "buffers.take": Part.STATE,
    "journal.reached": Part.STATE,
    "keep_buffers": Part.STATE,
    "take_accumulated": Part.STATE,
    "strategy.training_step": Part.REST,
    "strategy.optimizer_step": Part.REST,
    "GuardedUpdate": Part.REST,
    "ready": Part.REST,
    "lock.mark_ready": Part.REST,
    "lock.update, in": Part.REST,
    "lock.update, out": Part.REST,
    "applied": Part.STATE,
    "committed": Part.REST,
    "store_rng_states": Part.STREAMS,
    "streams": Part.STREAMS,
    "put_on_board": Part.STREAMS,
    "replicate_rng_states": Part.REPLICATION,
    "vote": Part.VOTE,
    "Work.wait": Part.WAITS,
    "nothing": Part.NOTHING,
    "torch's Work.wait": None,
    "MegatronStrategy.training_step": None,
    "MegatronStrategy.optimizer_step": None,
    "update_locally": None,
    "gather_parameters": None,
}


class Stopwatch:
    """Nanoseconds of the main thread in each call, without those in the calls inside it that are timed too.

    Attributes:
        running: False makes it call through.
        spent: by the path of names from the outermost timed call, since :meth:`lap`.
    """

    def __init__(self) -> None:
        self.running = False
        self.spent: dict[str, int] = defaultdict(int)
        self._open: list[tuple[str, list[int]]] = []  # path, and what was spent in calls inside
        self._in_whole = False
        self._main = threading.main_thread()

    def around(self, name: str, function: Callable[..., Any], whole: bool = False) -> Callable[..., Any]:
        """``function``, timed.

        Args:
            name: under which.
            whole: with everything inside it.
        """
        now = time.perf_counter_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            entered = now()
            if not self.running or self._in_whole:
                return function(*args, **kwargs)
            if threading.current_thread() is not self._main:
                try:
                    return function(*args, **kwargs)
                finally:  # the main thread waits for this one
                    if self._open:
                        self._open[-1][1][0] += now() - entered
            path = self._open[-1][0] + SEPARATOR + name if self._open else name
            inside = [0]
            self._open.append((path, inside))
            self._in_whole = whole
            began = now()
            try:
                return function(*args, **kwargs)
            finally:
                ended = now()
                self._in_whole = False
                self._open.pop()
                self.spent[path] += ended - began - inside[0]
                if self._open:
                    self._open[-1][1][0] += now() - entered

        return timed

    def replace(self, owner: Any, attribute: str, name: str, whole: bool = False) -> None:
        """Time an attribute of an object, a class or a module."""
        setattr(owner, attribute, self.around(name, getattr(owner, attribute), whole))

    def lap(self) -> dict[str, int]:
        """What was spent since the last lap."""
        spent, self.spent = self.spent, defaultdict(int)
        return dict(spent)


class _TimedUpdate(AbstractContextManager[None]):
    """``with lock.update(step)``, timed without its body."""

    def __init__(self, watch: Stopwatch, update: Callable[[int], Any], step: int) -> None:
        self._watch = watch
        self._enter = lambda: self._begin(update, step)
        self._inner: Any = None

    def _begin(self, update: Callable[[int], Any], step: int) -> None:
        self._inner = update(step)
        self._inner.__enter__()

    def __enter__(self) -> None:
        self._watch.around("lock.update, in", self._enter)()

    def __exit__(self, *exc_info: Any) -> Any:
        return self._watch.around("lock.update, out", self._inner.__exit__)(*exc_info)


class HookTimer(Callback):
    """Writes down what each step spent where, one JSON file per rank.

    Args:
        directory: where the files go.
        by_call: time each call by itself, which costs more than some of them take. Else only what the training
            calls of checkpointless is timed, with all that is inside.
    """

    def __init__(self, directory: str, by_call: bool = False) -> None:
        self._directory = Path(directory)
        self._by_call = by_call
        self._watch: Stopwatch | None = None
        self._nothing: Callable[[], None] = lambda: None
        self._began_ns = 0
        self._steps: list[dict[str, Any]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the stopwatch around everything."""
        self._watch = Stopwatch()
        self._nothing = self._watch.around("nothing", self._nothing)
        install(self._watch, trainer, self._by_call)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """A step begins (this callback stands before checkpointless's), and the one before is over."""
        if self._watch is not None:
            spent, ended_ns = self._watch.lap(), time.perf_counter_ns()
            if self._watch.running:
                self._steps.append({"whole": ended_ns - self._began_ns, "spent": spent})
            self._watch.running = True
            self._began_ns = time.perf_counter_ns()
            self._nothing()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Time, between the same ranks, what to compare with; write everything down."""
        strategy: Any = trainer.strategy
        manager, step = strategy.checkpoint_manager, trainer.global_step
        if self._watch is None:
            return
        self._watch.running = False
        number = torch.zeros(1)
        result = {
            "rank": dist.get_rank(),
            "steps": self._steps,
            "at_once": {
                "4-byte all_reduce, nobody late": over_and_over_ns(lambda: dist.all_reduce(number)),
                "barrier (the vote), nobody late": over_and_over_ns(dist.barrier),
                "random streams (both calls), over and over": over_and_over_ns(
                    lambda: _take_streams(manager, step)
                ),
                "all hooks around an update, over and over": over_and_over_ns(
                    lambda: _take_everything(strategy._fit.keeper, step)
                ),
            },
        }
        (self._directory / f"hooks-{dist.get_rank()}.json").write_text(json.dumps(result))


def install(watch: Stopwatch, trainer: Any, by_call: bool) -> None:
    """Time what checkpointless adds to the steps of ``trainer``."""
    from nemo.lightning.pytorch.strategies import MegatronStrategy

    from checkpointless.callbacks import CheckpointlessCallback
    from checkpointless.inprocess import active_call_wrapper
    from checkpointless.inprocess.communicators.process_groups import process_groups
    from checkpointless.inprocess.communicators.waits import _interruptible_wait
    from checkpointless.integrations.megatron.state import MegatronTensors
    from checkpointless.recovery import guard

    call = active_call_wrapper()
    strategy = trainer.strategy
    if call is None or call.board is None or strategy.checkpoint_manager is None:
        raise RuntimeError("there is nothing to time: checkpointless is off, or no agent runs")
    for callback in trainer.callbacks:
        if isinstance(callback, CheckpointlessCallback):
            for hook in ("on_train_batch_start", "on_train_batch_end"):
                watch.replace(callback, hook, f"CheckpointlessCallback.{hook}")
    for hook in ("training_step", "optimizer_step"):
        watch.replace(strategy, hook, f"strategy.{hook}")
        watch.replace(MegatronStrategy, hook, f"MegatronStrategy.{hook}")
    watch.replace(strategy._fit, "reached", "strategy.reached")
    watch.replace(strategy.checkpoint_manager, "replicate_rng_states", "replicate_rng_states", whole=True)
    optimizer = strategy.optimizers[0].mcore_optimizer
    watch.replace(optimizer, "step_with_ready_grads", "GuardedUpdate")
    watch.replace(MegatronTensors, "apply", "update_locally")
    watch.replace(MegatronTensors, "gather", "gather_parameters")
    watch.replace(guard, "vote", "vote", whole=True)
    for target, _, original in process_groups._patches._undos:
        if target is c10d.Work:
            work: Any = c10d.Work
            work.wait = original
            watch.replace(c10d.Work, "wait", "torch's Work.wait")
            work.wait = _interruptible_wait(work.wait)
            watch.replace(c10d.Work, "wait", "Work.wait")
    if by_call:
        _install_inside(watch, call, strategy)


def _install_inside(watch: Stopwatch, call: Any, strategy: Any) -> None:
    """Time the calls in what :func:`install` times."""
    from checkpointless.integrations.lightning.boundary import step_keeper
    from checkpointless.state import rng
    from checkpointless.state.rank_local import state as rank_local

    journal = strategy._fit.journal
    watch.replace(journal.state.buffers, "take", "buffers.take")
    watch.replace(journal, "reached", "journal.reached")
    watch.replace(strategy.checkpoint_manager.own.buffers, "keep", "keep_buffers")
    watch.replace(step_keeper, "Accumulated", "take_accumulated")
    watch.replace(strategy.checkpoint_manager, "store_rng_states", "store_rng_states")
    watch.replace(rank_local, "_put_on_board", "put_on_board")
    watch.replace(rng, "_take_streams", "streams")
    watch.replace(journal, "ready", "ready")
    watch.replace(journal, "applied", "applied")
    watch.replace(call, "committed", "committed")
    lock: Any = call.parameter_update_lock
    watch.replace(lock, "mark_ready", "lock.mark_ready")
    lock_update = lock.update
    lock.update = lambda step: _TimedUpdate(watch, lock_update, step)


def _take_streams(manager: Any, step: int) -> None:
    """What a step does with the random streams, when training is over."""
    manager.store_rng_states(step, stage=SnapshotPoint.TURNED)
    manager.store_rng_states(step + 1)


def _take_everything(keeper: Any, step: int) -> None:
    """What a step does with the state and the streams, but for the vote and what goes to another rank."""
    keeper.journal.ready(step + 1)
    with keeper._call.parameter_update_lock.update(step + 1):
        keeper.journal.applied()
    keeper._call.committed(step + 1)
    keeper.journal.reached(step + 1, SnapshotPoint.CHECKED)


def over_and_over_ns(call: Callable[[], Any]) -> list[int]:
    """How long a call takes that follows on itself; a collective, to which all ranks come together then."""
    taken = []
    for _ in range(_AFTERWARDS):
        began_ns = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - began_ns)
    return taken[_WARM_UP:]
