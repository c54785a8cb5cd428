"""A stopwatch around what checkpointless adds to any trainer's steps, by wall clock and by the thread's own time.

Whatever is entered from the trainer is timed with everything inside, and what the trainer would do anyway is timed
inside that and not counted. So a part of checkpointless that is not named here is still in the sum.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

STREAMS, REST, VOTE, WAITS, TRAINING = "streams", "rest", "vote", "waits", "training"
_Times = tuple[int, int]


def _now() -> _Times:
    return time.perf_counter_ns(), time.thread_time_ns()


class TrainerTimer:
    """Nanoseconds of the main thread in calls of each part, without those in the calls inside that are timed, too.

    Args:
        call: the running wrapper.
        directory: where :meth:`write` puts a file per rank.
    """

    def __init__(self, call: Any, directory: str) -> None:
        self._directory = Path(directory)
        self._spent: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._inside: list[list[int]] = []  # of each open call, what was spent in calls inside
        self._in_whole = False
        self._steps: list[dict[str, Any]] = []
        self._began: _Times | None = None
        self._time_manager(call.checkpoint_manager)

    def around(self, part: str, function: Callable[..., Any], whole: bool = False) -> Callable[..., Any]:
        """Return ``function``, timed; ``whole``: calls inside it count as it does."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._in_whole or threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            self._inside.append([0, 0])
            self._in_whole = whole
            began = _now()
            try:
                return function(*args, **kwargs)
            finally:
                taken = [after - before for after, before in zip(_now(), began)]
                self._in_whole = False
                inside = self._inside.pop()
                for at in (0, 1):
                    self._spent[part][at] += taken[at] - inside[at]
                    if self._inside:
                        self._inside[-1][at] += taken[at]

        return timed

    def replace(self, owner: Any, attribute: str, part: str, whole: bool = False) -> None:
        """Time an attribute of an object, a class or a module."""
        setattr(owner, attribute, self.around(part, getattr(owner, attribute), whole))

    def lap(self) -> None:
        """Begin a step, and write down the one that is over."""
        now = _now()
        if self._began is not None:
            whole = [after - before for after, before in zip(now, self._began)]
            self._steps.append({"whole": whole, "spent": dict(self._spent)})
        self._spent.clear()
        self._began = _now()

    def write(self) -> None:
        """Write down all steps."""
        path = self._directory / f"hooks-{dist.get_rank()}.json"
        path.write_text(json.dumps({"rank": dist.get_rank(), "steps": self._steps}))

    def _time_manager(self, manager: Any) -> None:
        from checkpointless.inprocess.communicators.process_groups import process_groups
        from checkpointless.inprocess.communicators.waits import _interruptible_wait
        from checkpointless.integrations.torch import loop
        from checkpointless.recovery import guard

        self.replace(manager, "store_rng_states", STREAMS)
        self.replace(guard, "vote", VOTE, whole=True)
        self.replace(loop, "vote", VOTE, whole=True)
        for target, _, original in process_groups._patches._undos:
            if target is c10d.Work:
                work: Any = c10d.Work
                work.wait = original
                self.replace(c10d.Work, "wait", TRAINING)
                work.wait = _interruptible_wait(work.wait)
                self.replace(c10d.Work, "wait", WAITS)

    # --- trainers -------------------------------------------------------------------------------------------------

    def time_loop(self, training: Any) -> None:
        """Time a loop of one's own; its steps are those of :meth:`steps`."""
        self.replace(training, "update", REST)
        for optimizer in getattr(training, "optimizers", ()):
            self.replace(optimizer, "step", TRAINING)
            self.replace(optimizer, "zero_grad", TRAINING)

    def time_megatron(self, training: Any, optimizer: Any) -> None:
        """Time a loop of one's own with Megatron's optimizer."""
        from checkpointless.integrations.megatron.state import MegatronTensors

        self.replace(training, "update", REST)
        self.replace(optimizer, "step", TRAINING)
        self.replace(optimizer, "step_with_ready_grads", REST)
        self.replace(MegatronTensors, "apply", TRAINING)
        self.replace(MegatronTensors, "gather", TRAINING)
        self.replace(optimizer, "zero_grad", TRAINING)
        for chunk in training.state.modules:
            self.replace(chunk, "zero_grad_buffer", TRAINING)

    def steps(self, training: Any, last: int) -> Any:
        """Yield the steps of a loop's training, timed."""
        steps = iter(training.steps(last))
        advance = self.around(REST, lambda: next(steps, None))
        while True:
            self.lap()
            step = advance()
            if step is None:
                return
            yield step

    def time_lightning(self, trainer: Any) -> None:
        """Time a trainer of Lightning's with one of our strategies for torch optimizers."""
        from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization

        from checkpointless.callbacks import CheckpointlessCallback

        strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop.automatic_optimization
        for callback in trainer.callbacks:
            if isinstance(callback, CheckpointlessCallback):
                self.replace(callback, "on_train_batch_start", REST)
                self.replace(callback, "on_train_batch_end", REST)
        for method in ("training_step", "backward", "optimizer_step"):
            base = next(
                c for c in type(strategy).__mro__ if c.__module__.startswith("lightning") and method in vars(c)
            )
            self.replace(base, method, TRAINING)
            self.replace(strategy, method, REST)
        self.replace(_AutomaticOptimization, "_optimizer_step", TRAINING)
        self.replace(loop, "_optimizer_step", REST)
        self.replace(loop.steps, "_step", REST)
        self.replace(strategy.precision_plugin, "_wrap_closure", TRAINING)
        (optimizer,) = strategy.optimizers
        self.replace(optimizer, "step", TRAINING)
        for method in ("reached", "before_fetch"):
            self.replace(strategy._fit, method, REST)
