"""What users add to a training: callbacks, modules and data of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.llm.gpt.model.base import gpt_data_step
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, default_collate
from torchmetrics import CatMetric, MeanMetric, SumMetric

from checkpointless.demo.text import TextDataModule, TextWindows, english
from tests.ranks.users.end import broken, note, run_dir

SEQ_LENGTH, MICRO_BATCH, GLOBAL_BATCH = 32, 2, 16  # two micro-batches of four ranks


# --- callbacks ----------------------------------------------------------------------------------------------------


class Averaging(pl.Callback):
    """An average of the parameters over the steps, as users keep it: tensors and an array in its state."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.updates = 0
        self.average: dict[str, torch.Tensor] = {}
        self.history = np.zeros(0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """One update."""
        for name, parameter in trainer.strategy.megatron_parallel.named_parameters():
            if name not in self.average:
                self.average[name] = parameter.detach().clone()
            else:
                self.average[name].mul_(self.decay).add_(parameter.detach(), alpha=1 - self.decay)
        self.updates += 1
        self.history = np.append(self.history, float(next(iter(self.average.values())).sum()))

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {"updates": self.updates, "average": dict(self.average), "history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self.updates = state_dict["updates"]
        self.average = {name: tensor.clone() for name, tensor in state_dict["average"].items()}
        self.history = np.array(state_dict["history"])


class KeepsByHooks(pl.Callback):
    """Keeps its count in the checkpoint itself, as callbacks did before ``state_dict``."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        """One more."""
        self.batches += 1

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Into the checkpoint."""
        checkpoint["keeps_by_hooks"] = {"batches": self.batches}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Out of it."""
        self.batches = checkpoint["keeps_by_hooks"]["batches"]


class Pace(pl.Callback):
    """Makes every step wait, so that a long run is not over in a minute.

    Args:
        seconds: of each step.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, *args: Any) -> None:
        """Wait."""
        time.sleep(self.seconds)


class EndsSaves(pl.Callback):
    """Ends the saves in the background before a step begins, however long their writers take.

    Args:
        step: which; 0: never.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Wait for the writers, all ranks together."""
        if trainer.global_step + 1 == self.step:
            trainer.strategy.checkpoint_io.maybe_finalize_save_checkpoint(blocking=True)


class Breaks(pl.Callback):
    """Fails on rank 1, once in a job, where no phase of a fault spec lies.

    Args:
        fit: the number of the fit.
        where: ``HOW WHERE FIT`` with ``raise`` or ``kill``, ``setup`` or ``validate``, and a number; "": nowhere.
    """

    def __init__(self, fit: int, where: str) -> None:
        how, self.where, number = where.split() if where else ("", "", "-1")
        self.kills = how == "kill"
        self.active = fit == int(number) and os.environ["RANK"] == "1" and not broken(run_dir())

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The strategy has been set up, and nothing is loaded."""
        if self.where == "setup":
            self._fail()

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        """In the middle of a validation that belongs to no fit."""
        if self.where == "validate" and trainer.state.fn == "validate":
            self._fail()

    def _fail(self) -> None:
        if not self.active:
            return
        self.active = False
        note("broken")
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("broken on purpose")


class Probe(pl.Callback):
    """Writes down which hooks were called, and what a validation found.

    Args:
        fit: the number of the fit.
    """

    def __init__(self, fit: int) -> None:
        self.fit = fit

    def _hook(self, name: str, trainer: Any) -> None:
        note("hook", name=f"{name} at step {trainer.global_step}", fit=self.fit)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch of that number is over."""
        note("batch", fit=self.fit, step=trainer.global_step, index=batch_idx)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """The metrics are there."""
        if trainer.sanity_checking:
            return
        self._hook("on_validation_end", trainer)
        for name, value in trainer.callback_metrics.items():
            if name.startswith("val_loss"):
                note("validation", fit=self.fit, step=trainer.global_step, loader=name, loss=float(value).hex())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Training is over."""
        self._hook("on_train_end", trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """An epoch is over."""
        self._hook("on_train_epoch_end", trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """All is over."""
        self._hook("on_fit_end", trainer)


# --- modules ------------------------------------------------------------------------------------------------------


def noting_data_step(fit: int, count_from: list[int], iterator: Iterator[Any]) -> dict[str, Any]:
    """NeMo's data step, which writes down which samples are trained on."""
    batch = next(iterator)
    inner = batch[0] if isinstance(batch, tuple) else batch
    if torch.is_grad_enabled() and "sample" in inner:
        note("samples", fit=fit, step=count_from[0] + 1, ids=inner["sample"].tolist())
    return dict(gpt_data_step(iter([batch])))


class CountingGPT(llm.GPTModel):
    """A GPT whose Lightning module counts its batches in a checkpoint of its own making, if asked to.

    Args:
        *args: as for ``GPTModel``.
        fit: the number of the fit.
        keeps: whether it has the usual pair of checkpoint hooks.
        metrics: whether it logs what is accumulated over an epoch.
        counts_starts: whether it counts how often training and its epochs began.
        counts: whether its layers have buffers that are the rank's own.
        **kwargs: as for ``GPTModel``.
    """

    def __init__(
        self,
        *args: Any,
        fit: int = 0,
        keeps: bool = False,
        metrics: bool = False,
        counts_starts: bool = False,
        counts: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.batches_seen = 0
        self.keeps = keeps
        self._counts = counts
        self.counts_starts = counts_starts
        self.starts: list[int] = []
        self.fit_number = fit
        self.metrics: Any = torch.nn.ModuleDict()
        if metrics:  # of this rank alone; one of them is logged, and so is reduced over all ranks
            self.metrics = torch.nn.ModuleDict({"mean": MeanMetric(), "all": CatMetric(), "quiet": SumMetric()})
        self._steps = [0]
        self.config.data_step_fn = partial(noting_data_step, fit, self._steps)

    def configure_model(self, *args: Any, **kwargs: Any) -> None:
        """Megatron's model, with what users add to it."""
        super().configure_model(*args, **kwargs)
        if self._counts and not hasattr(self.module.decoder.layers[0], "seen"):
            count_own_tokens(self.module)

    def training_step(self, batch: Any, batch_idx: Any = None) -> Any:
        """One micro-batch."""
        found = super().training_step(batch, batch_idx)
        if self.metrics:
            mine = batch["tokens"].float().mean()
            self.metrics["mean"].update(mine)
            self.metrics["all"].update(mine)
            self.metrics["quiet"].update(mine)
            self.log("mean_of_epoch", self.metrics["mean"], on_step=False, on_epoch=True, batch_size=1)
            self.log("mine_of_epoch", mine, on_step=True, on_epoch=True, batch_size=MICRO_BATCH)
            self.log("largest_of_epoch", mine, on_step=False, on_epoch=True, reduce_fx="max", batch_size=1)
            self.log("summed_over_all", mine, on_epoch=True, reduce_fx="sum", sync_dist=True, batch_size=1)
        return found

    def on_train_start(self) -> None:
        """Training begins."""
        if self.counts_starts:
            self.starts.append(self.trainer.global_step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """A step begins."""
        self._steps[0] = self.trainer.global_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """One more."""
        self.batches_seen += 1
        if self.metrics:
            self.log("ends", float(self.batches_seen), on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1)

    def on_train_epoch_start(self) -> None:
        """What the last epoch came to."""
        if self.metrics:
            found = {name: float(value).hex() for name, value in self.trainer.callback_metrics.items()}
            note("epoch", fit=self.fit_number, number=self.trainer.current_epoch, metrics=found)
            self.log("begun_at", float(self.trainer.global_step), on_epoch=True)

    def accumulated(self) -> dict[str, Any]:
        """What is not logged, and is kept over the epochs."""
        return {"quiet": self.metrics["quiet"].compute()} if self.metrics else {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Into the checkpoint."""
        if self.counts_starts:
            checkpoint["starts"] = self.starts
        if self.keeps:
            checkpoint["batches_seen"] = self.batches_seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Out of it."""
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
    """A rate that is halved whenever a validation was no better than the one before.

    Args:
        every: steps between two validations.
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    def scheduler(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """For Lightning."""
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


# --- data ---------------------------------------------------------------------------------------------------------


class Numbered(Dataset[dict[str, torch.Tensor]]):
    """Windows of text that know their number."""

    def __init__(self, windows: Dataset[dict[str, torch.Tensor]]) -> None:
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**self._windows[index], "sample": torch.tensor(index)}


class NumberedTextData(TextDataModule):
    """The demo's data module, with its ``state_dict``; the samples are numbered.

    Args:
        loaders: how many for validation.
        **kwargs: as for ``TextDataModule``.
    """

    def __init__(self, loaders: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loaders = loaders

    def setup(self, stage: str = "") -> None:
        """Number the samples."""
        super().setup(stage)
        self._train: Any = Numbered(self._train)

    def val_dataloader(self) -> Any:
        """One, or several."""
        made = [super(NumberedTextData, self).val_dataloader() for _ in range(self.loaders)]
        return made[0] if len(made) == 1 else made


class TakesAllAsItComes(MegatronDataSampler):
    """Leaves the samples to the loader's own sampler."""

    def transform_dataloader(self, dataloader: DataLoader[Any], consumed_samples: int = 0) -> DataLoader[Any]:
        """As it is."""
        return dataloader


class Shuffled(pl.LightningDataModule):
    """Torch's own sampler, which shuffles.

    Args:
        samples: of each rank in an epoch.
        seed: of a generator of the loader's own; None: it takes the streams of the process.
    """

    def __init__(self, samples: int, seed: int | None = None) -> None:
        super().__init__()
        self.samples = samples
        self.seed = seed
        self.data_sampler = TakesAllAsItComes(SEQ_LENGTH, MICRO_BATCH, GLOBAL_BATCH)

    def setup(self, stage: str = "") -> None:
        """Cut the text."""
        self._train = Numbered(TextWindows(english(), SEQ_LENGTH, self.samples, seed=3))

    def train_dataloader(self) -> DataLoader[Any]:
        """To train on."""
        own = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        return DataLoader(
            self._train, MICRO_BATCH, shuffle=True, generator=own, drop_last=True, collate_fn=default_collate
        )


class OwnData(pl.LightningDataModule):
    """As in the first script of a user: a dataset, a sampler of NeMo's, and no state.

    Args:
        samples: of the training set; the sampler ends an epoch with them.
        order: NeMo's ``dataloader_type``.
        val_samples: of the validation set.
        workers: of each loader.
    """

    def __init__(
        self, samples: int, order: str = "single", val_samples: int = 2 * GLOBAL_BATCH, workers: int = 0
    ) -> None:
        super().__init__()
        self.samples = samples
        self.val_samples = val_samples
        self.workers = workers
        self.data_sampler = MegatronDataSampler(
            seq_len=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH,
            global_batch_size=GLOBAL_BATCH,
            dataloader_type=order,  # type: ignore[arg-type]
        )

    def setup(self, stage: str | None = None) -> None:
        """Cut the text."""
        self._train = Numbered(TextWindows(english(), SEQ_LENGTH, self.samples, seed=3))
        self._validation = TextWindows(english(), SEQ_LENGTH, self.val_samples, seed=4)

    def train_dataloader(self) -> DataLoader[Any]:
        """To train on."""
        return DataLoader(self._train, num_workers=self.workers, collate_fn=default_collate)

    def val_dataloader(self) -> DataLoader[Any]:
        """To look at."""
        return DataLoader(self._validation, collate_fn=default_collate)


class CountingData(OwnData):
    """Counts, in a state of its own, how often training or an epoch of it began.

    Args:
        *args: as for ``OwnData``.
        **kwargs: as for ``OwnData``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.starts: list[int] = []

    def train_dataloader(self) -> DataLoader[Any]:
        """A loader is made."""
        assert self.trainer is not None
        self.starts.append(self.trainer.global_step)
        return super().train_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """Its count."""
        return {"starts": self.starts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the count."""
        self.starts = state_dict["starts"]


class TwoLoaders(OwnData):
    """Trains on two loaders at once."""

    def train_dataloader(self) -> Any:
        """Both."""
        return {name: super(TwoLoaders, self).train_dataloader() for name in ("one", "other")}
