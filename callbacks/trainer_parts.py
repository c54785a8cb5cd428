"""Where Lightning's trainer keeps what an abort has to stop: data-loader workers and checkpoint writers."""

from __future__ import annotations

import operator
from typing import Any

import lightning.pytorch as pl

from checkpointless.inprocess import active_call_wrapper
from checkpointless.inprocess.abort import register_trainer_parts
from checkpointless.recovery.manager import manager_of


class _LightningTrainerParts:
    """Finds the parts of Lightning's trainer, and nothing in another object."""

    def loader_iterators(self, trainer: object) -> list[Any]:
        """Return torch's iterators of the training and validation loaders that have worker processes."""
        fit_loop = getattr(trainer, "fit_loop", None)
        loops = (fit_loop, getattr(getattr(fit_loop, "epoch_loop", None), "val_loop", None))
        return [each for loop in loops for each in worker_iterators(getattr(loop, "_combined_loader", None))]

    def stop_saves(self, trainer: object) -> None:
        """Have the strategy keep its asynchronous saves, or kill their writers if it cannot."""
        strategy = getattr(trainer, "strategy", None)
        keep_saves = getattr(strategy, "keep_saves", None)
        if keep_saves is not None:
            keep_saves()
            return
        checkpoint_io = getattr(strategy, "_checkpoint_io", None)
        queue = getattr(checkpoint_io, "async_calls_queue", None)
        for call in getattr(queue, "async_calls", ()):
            process = getattr(getattr(call, "async_caller", None), "process", None)
            if process is not None and process.is_alive():
                process.kill()


def job_step(trainer: pl.Trainer) -> int:
    """Return the optimizer step of a trainer over all fits of the block (``global_step`` is slow)."""
    manager = manager_of(active_call_wrapper())
    fit_loop: Any = trainer.fit_loop
    known: Any = vars(fit_loop).get(_MODULE)
    if known is None or known[0] is not trainer.strategy:
        module = trainer.lightning_module
        known = trainer.strategy, module is None or bool(module.automatic_optimization)
        setattr(fit_loop, _MODULE, known)
    made = int(_optimizer_steps(fit_loop)) if known[1] else int(trainer.global_step)
    return made + (manager.fits.offset if manager is not None else 0)


_MODULE = "_checkpointless_module"
_optimizer_steps = operator.attrgetter(
    "epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed"
)


def worker_iterators(combined_loader: object) -> list[Any]:
    """Return the multiprocessing iterators inside a Lightning ``CombinedLoader``."""
    mode_iterator = getattr(combined_loader, "_iterator", None)
    found = [*getattr(mode_iterator, "iterators", ())]
    # Between two passes, a loader alone has its persistent workers.
    found += [getattr(each, "_iterator", None) for each in getattr(combined_loader, "flattened", ())]
    return [each for each in {id(each): each for each in found}.values() if hasattr(each, "_workers")]


register_trainer_parts("lightning", _LightningTrainerParts())
