"""Trains ``examples/train_bridge.py``'s GPT and times its steps: ``DIRECTORY STEPS with|without``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from train_bridge import configuration

from checkpointless import HPWrapper
from checkpointless.integrations.megatron.pretraining import _Training
from checkpointless.integrations.megatron_bridge import pretrain

# isort: split
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.gpt_step import forward_step

HOOKS = ("begin_step", "ready", "end_step")


class Stopwatch(Callback):  # type: ignore[misc]
    """Notes when each step begins, and how long checkpointless takes in it."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.spent: list[dict[str, int]] = []

    def on_train_step_start(self, context: Any) -> None:
        self.began.append(time.perf_counter_ns())
        self.spent.append(defaultdict(int))

    def around(self, name: str) -> None:
        """Time a method of the training; it begins a step before the callback hears of the step."""
        inner: Callable[..., Any] = getattr(_Training, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.perf_counter_ns()
            result = inner(*args, **kwargs)
            if self.spent:
                self.spent[-1][name] += time.perf_counter_ns() - before
            return result

        setattr(_Training, name, timed)


def main() -> None:
    """Train, and write down what each step took."""
    directory, steps, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    stopwatch = Stopwatch()

    def train() -> None:
        config = configuration(steps, 1)
        config.train.eval_iters = 0
        config.logger.log_interval = 1000
        pretrain(config, forward_step, callbacks=[stopwatch])

    if how == "with":
        for name in HOOKS:
            stopwatch.around(name)
        train = HPWrapper()(train)
    train()
    made = [
        {"whole": after - before, "spent": dict(spent)}
        for before, after, spent in zip(stopwatch.began, stopwatch.began[1:], stopwatch.spent)
    ]
    (directory / f"steps-{how}-{os.environ['RANK']}.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main()
