"""Provide modules that users train: a GPT that counts and accumulates, and a rate that follows the validations."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.llm.gpt.model.base import gpt_data_step
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import CatMetric, MeanMetric, SumMetric

from tests.ranks.users.data import MICRO_BATCH
from tests.ranks.users.end import note

#: What Megatron fuses only with kernels for CUDA.
UNFUSED: dict[str, Any] = dict.fromkeys(
    ("masked_softmax_fusion", "bias_dropout_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion"), False
) | {"gradient_accumulation_fusion": False}


def noting_data_step(fit: int, count_from: list[int], iterator: Iterator[Any]) -> dict[str, Any]:
    batch = next(iterator)
    inner = batch[0] if isinstance(batch, tuple) else batch
    if torch.is_grad_enabled() and "sample" in inner:
        note("samples", fit=fit, step=count_from[0] + 1, ids=inner["sample"].tolist())
    return dict(gpt_data_step(iter([batch])))


class CountingGPT(llm.GPTModel):
    """Counts its batches, and keeps the count by its own checkpoint hooks if asked to."""

    def __init__(self, *args: Any, fit: int = 0, features: frozenset[str] = frozenset(), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches_seen = 0
        self.keeps = "module-state" in features
        self._counts = "own-buffers" in features
        self.counts_starts = "start-hooks" in features
        self.starts: list[int] = []
        self.fit_number = fit
        self.metrics: Any = torch.nn.ModuleDict()
        if "epoch-metrics" in features:  # each is of this rank alone; the one that is logged is reduced over all
            self.metrics = torch.nn.ModuleDict({"mean": MeanMetric(), "all": CatMetric(), "quiet": SumMetric()})
        self._steps = [0]
        self.config.data_step_fn = partial(noting_data_step, fit, self._steps)

    def configure_model(self, *args: Any, **kwargs: Any) -> None:
        super().configure_model(*args, **kwargs)
        if self._counts and not hasattr(self.module.decoder.layers[0], "seen"):
            count_own_tokens(self.module)

    def training_step(self, batch: Any, batch_idx: Any = None) -> Any:
        found = super().training_step(batch, batch_idx)
        if self.metrics:
            mine = batch["tokens"].float().mean()
            for metric in self.metrics.values():
                metric.update(mine)
            self.log("mean_of_epoch", self.metrics["mean"], on_step=False, on_epoch=True, batch_size=1)
            self.log("mine_of_epoch", mine, on_step=True, on_epoch=True, batch_size=MICRO_BATCH)
            self.log("largest_of_epoch", mine, on_step=False, on_epoch=True, reduce_fx="max", batch_size=1)
            self.log("summed_over_all", mine, on_epoch=True, reduce_fx="sum", sync_dist=True, batch_size=1)
        return found

    def on_train_start(self) -> None:
        if self.counts_starts:
            self.starts.append(self.trainer.global_step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._steps[0] = self.trainer.global_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches_seen += 1
        if self.metrics:
            self.log("ends", float(self.batches_seen), on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1)

    def on_train_epoch_start(self) -> None:
        if self.metrics:
            found = {name: float(value).hex() for name, value in self.trainer.callback_metrics.items()}
            note("epoch", fit=self.fit_number, number=self.trainer.current_epoch, metrics=found)
            self.log("begun_at", float(self.trainer.global_step), on_epoch=True)

    def accumulated(self) -> dict[str, Any]:
        """Return what is not logged and is kept over the epochs."""
        return {"quiet": self.metrics["quiet"].compute()} if self.metrics else {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.counts_starts:
            checkpoint["starts"] = self.starts
        if self.keeps:
            checkpoint["batches_seen"] = self.batches_seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.counts_starts:
            self.starts = checkpoint.pop("starts")
        if self.keeps:
            self.batches_seen = checkpoint["batches_seen"]


def count_own_tokens(model: Any) -> None:
    """Have every layer keep in a buffer what its rank has seen, as a normalisation of its own batches does."""

    def see(layer: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        if layer.training and torch.is_grad_enabled():
            seen = (outputs[0] if isinstance(outputs, tuple) else outputs).detach()
            layer.get_buffer("seen").mul_(0.9).add_(seen.mean((0, 1)), alpha=0.1)

    for layer in model.decoder.layers:
        layer.register_buffer("seen", torch.zeros(model.config.hidden_size), persistent=False)
        layer.register_forward_hook(see)


class PlateauScheduler(nl.lr_scheduler.LRSchedulerModule):
    """Halves the rate after every validation whose loss is not far below the best before."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    def scheduler(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """Return the scheduler in the form that Lightning takes."""
        found = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs")
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": found,
                "interval": "step",
                "frequency": self.every,
                "monitor": "val_loss",
            },
            "monitor": "val_loss",
        }
