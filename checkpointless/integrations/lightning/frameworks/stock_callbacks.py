"""Lightning's own callbacks that no recovery can go on with, each with what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightning.pytorch import callbacks as stock

_AVERAGES = (
    "{} exchanges weights in hooks, from copies that no rank that is made anew has: let the optimizer's "
    "register_step_post_hook update a torch.optim.swa_utils.AveragedModel that is a part of the module"
)
_TUNES = "{} trains before the fit, again after each fault: tune in another job"

#: By the names of the classes, of which older versions of Lightning lack some.
_UNFIT = {
    "LearningRateFinder": _TUNES,
    "BatchSizeFinder": _TUNES,
    "BaseFinetuning": (
        "{} gives the optimizer more parameters while it trains, which no rank that is made anew has: give it all "
        "of them in configure_optimizers"
    ),
    "StochasticWeightAveraging": _AVERAGES,
    "WeightAveraging": _AVERAGES,
    "ModelPruning": (
        "{} gives the model masks while it trains, which no rank that is made anew has: call torch.nn.utils.prune "
        "in configure_model"
    ),
    "SpikeDetection": (
        "{} ends training with an exception, which is recovered from: compare the loss in a hook, and set "
        "trainer.should_stop"
    ),
}


def unfit(callbacks: Iterable[object]) -> str | None:
    """Say in one line why a training with ``callbacks`` cannot be recovered exactly; None: nothing is known.

    Args:
        callbacks: the callbacks of a trainer.
    """
    return next(_reasons(callbacks), None)


def _reasons(callbacks: Iterable[object]) -> Iterator[str]:
    kinds = [(getattr(stock, name), reason) for name, reason in _UNFIT.items() if hasattr(stock, name)]
    for each in callbacks:
        for kind, reason in kinds:
            if isinstance(each, kind):
                yield reason.format(type(each).__name__)
