"""Provide data modules as users have them.

They are NeMo's own, on data that the test writes, and some that deal out samples in other ways.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from nemo.collections.llm import FineTuningDataModule, MockDataModule
from nemo.collections.llm.gpt.data.mock import _MockGPTDataset
from nemo.lightning.data import WrappedDataLoader
from torch.utils.data import IterableDataset

from checkpointless.testing.demo.corpus import english
from checkpointless.testing.demo.text import ByteTokenizer, TextDataModule
from tests.ranks.users.data import TakesAllAsItComes


class Mock(MockDataModule):
    """Gives the attention mask that NeMo's module means to give where TransformerEngine is not installed.

    NeMo's hands ``create_attention_mask`` to its dataset at the place of the seed.
    """

    def setup(self, stage: str = "") -> None:
        sizes = {"train": self.num_train_samples, "valid": self.num_val_samples, "test": self.num_test_samples}
        self._train_ds, self._validation_ds, self._test_ds = (
            _MockGPTDataset(self.tokenizer, name, size, self.seq_length, create_attention_mask=True)
            for name, size in sizes.items()
        )


class CyclicText(TextDataModule):
    """Deals out the demo's text by Megatron's cyclic sampler: in an order of its own for every pass."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.data_sampler.dataloader_type = "cyclic"


class TwoValidations(TextDataModule):
    def val_dataloader(self) -> Any:
        return [self._dataloader(self._validation, "validation"), self._dataloader(self._train, "validation")]


class Conversations(FineTuningDataModule):
    """Has NeMo's fine-tuning module read pairs of input and output that are cut from English."""

    def __init__(self, dataset_root: str, **kwargs: Any) -> None:
        super().__init__(dataset_root, tokenizer=ByteTokenizer(), **kwargs)


def write(folder: str) -> None:
    """Write what :class:`Conversations` and NeMo's ``PreTrainingDataModule`` read."""
    _write_conversations(Path(folder) / "conversations")
    _write_indexed_dataset(Path(folder) / "english")


def _write_conversations(folder: Path) -> None:
    folder.mkdir()
    text, draw = english().decode(errors="ignore"), random.Random(7)
    for name in ("training", "validation", "test"):
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(128):
                start, first, second = draw.randrange(100_000), draw.randrange(8, 24), draw.randrange(8, 24)
                middle = start + first
                pair = {"input": text[start:middle], "output": text[middle : middle + second]}
                file.write(json.dumps(pair) + "\n")


def _write_indexed_dataset(prefix: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    text, draw = english(), random.Random(11)
    for _ in range(200):
        start = draw.randrange(len(text) - 600)
        tokens = [*text[start : start + draw.randrange(50, 500)], ByteTokenizer.eos_id]
        builder.add_document(torch.tensor(tokens, dtype=torch.int32), [len(tokens)])
    builder.finalize(f"{prefix}.idx")


class EndlessText(IterableDataset):
    """Gives English, sample after sample, from where its state says; each data-parallel rank has its own."""

    def __init__(self, rank: int, ranks: int, seq_length: int) -> None:
        self._rank, self._ranks, self._seq_length = rank, ranks, seq_length
        self._given = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        text = torch.frombuffer(bytearray(english()), dtype=torch.uint8)
        length = self._seq_length
        mask = torch.ones(1, length, length, dtype=torch.bool).triu(1)
        while True:
            place = (self._given * self._ranks + self._rank) * length % (len(text) - length - 1)
            window = text[place : place + length + 1].long()
            self._given += 1
            yield {
                "tokens": window[:-1],
                "labels": window[1:],
                "loss_mask": torch.ones(length),
                "position_ids": torch.arange(length),
                "attention_mask": mask,
            }

    def state_dict(self) -> dict[str, int]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._given = state["given"]


class ResumableLoader(WrappedDataLoader):
    """Says where its dataset stands, by Lightning's protocol of resumable loaders."""

    dataset: Any

    def state_dict(self) -> dict[str, int]:
        return self.dataset.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.dataset.load_state_dict(state)


class IterableText(pl.LightningDataModule):
    """Provides text from a dataset that has no indices, but a state."""

    def __init__(self, seq_length: int = 64, micro_batch_size: int = 2, global_batch_size: int = 16) -> None:
        super().__init__()
        self.seq_length, self.micro_batch_size = seq_length, micro_batch_size
        self.tokenizer = ByteTokenizer()
        self.data_sampler = TakesAllAsItComes(seq_length, micro_batch_size, global_batch_size)

    def train_dataloader(self) -> ResumableLoader:
        """Return a loader of this data-parallel rank's samples, which never end."""
        from megatron.core import parallel_state

        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        return ResumableLoader(
            mode="train", dataset=EndlessText(rank, ranks, self.seq_length), batch_size=self.micro_batch_size
        )
