"""Provide the tests' text with random numbers in it, drawn where a user's augmentation draws them."""

import os
import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from nemo.lightning.data import WrappedDataLoader
from torch.utils.data import Dataset, default_collate

from checkpointless.testing.demo.text import TextDataModule

Sample = dict[str, torch.Tensor]


class NoisyWindows(Dataset[Sample]):
    """Changes one token, one label and one weight of every item: by torch, by NumPy and by Python."""

    def __init__(self, windows: Dataset[Sample]) -> None:
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Sample:
        sample = {name: tensor.clone() for name, tensor in self._windows[index].items()}
        length = len(sample["tokens"])
        sample["tokens"][int(torch.randint(length, ()))] = int(torch.randint(256, ()))
        sample["labels"][np.random.randint(length)] = np.random.randint(256)
        sample["loss_mask"][random.randrange(length)] = random.random()
        return sample


def noisy_collate(samples: list[Sample]) -> Sample:
    """Change one token more of the whole batch, by torch, NumPy and Python together."""
    batch: Sample = default_collate(samples)
    batch["tokens"][int(torch.randint(len(samples), ())), np.random.randint(8)] = random.randrange(256)
    return batch


class NoisyTextDataModule(TextDataModule):
    """Adds noise from the data-loader workers to every training sample and batch of ``TextDataModule``."""

    def train_dataloader(self) -> WrappedDataLoader:
        loader = self._dataloader(NoisyWindows(self._train), "train")  # type: ignore[arg-type]
        loader.collate_fn = noisy_collate
        return loader


class NoisyEmbedding(pl.Callback):
    """Adds a number from the training process's own torch stream to every embedding."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        assert loader.worker_init_fn.key[2] == "training"
        for module in pl_module.modules():
            if isinstance(module, LanguageModelEmbedding):
                module.register_forward_hook(self._add)

    @staticmethod
    def _add(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + torch.rand(())


class ReseedingDataModule(NoisyTextDataModule):
    """Seeds everything with another number whenever the block is entered again."""

    def setup(self, stage: str = "") -> None:
        super().setup(stage)
        os.environ["PL_GLOBAL_SEED"] = str(100 + int(os.environ["JOB_RESTART_COUNT"]))
