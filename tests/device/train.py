"""Run a user's training, ``tests/ranks/users/training.py``, on the test device."""

import sys
from typing import Any

GRAPHS = "--graphs"  # a graph with a collective is replayed in every step

if __name__ == "__main__":
    from tests.device import played

    played.install()

    import torch
    import torch.distributed as dist
    from lightning.pytorch.callbacks import Callback
    from megatron.core import parallel_state

    from tests.ranks.users import training

    class ReplaysGraph(Callback):
        def __init__(self) -> None:
            self._graph: Any = None

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            group = parallel_state.get_data_parallel_group()
            if self._graph is None:
                self._summed = torch.zeros(1)
                self._graph = torch.cuda.CUDAGraph()
                self._graph.capture_begin()
                dist.all_reduce(self._summed, group=group)
                self._graph.capture_end()
            self._summed.fill_(trainer.global_step)
            self._graph.replay()
            if self._summed.item() != trainer.global_step * group.size():
                raise AssertionError(f"a replay summed to {self._summed.item()} at step {trainer.global_step}")

    if GRAPHS in sys.argv:
        sys.argv.remove(GRAPHS)
        training.more_callbacks.append(ReplaysGraph)
    training.main()
