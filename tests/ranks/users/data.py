"""Provide data modules as users write them; every training sample knows its number."""

from typing import Any

import lightning.pytorch as pl
import torch
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.utils.data import DataLoader, Dataset, default_collate

from checkpointless.testing.demo.corpus import TextWindows, english
from checkpointless.testing.demo.text import TextDataModule

SEQ_LENGTH, MICRO_BATCH, GLOBAL_BATCH = 32, 2, 16  # two micro-batches of four ranks


class Numbered(Dataset[dict[str, torch.Tensor]]):
    """Adds to every window of text its number."""

    def __init__(self, windows: Dataset[dict[str, torch.Tensor]]) -> None:
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**self._windows[index], "sample": torch.tensor(index)}


class NumberedTextData(TextDataModule):
    """Numbers the samples of the demo's data module, which has a ``state_dict``."""

    def __init__(self, loaders: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loaders = loaders

    def setup(self, stage: str = "") -> None:
        super().setup(stage)
        self._train: Any = Numbered(self._train)

    def val_dataloader(self) -> Any:
        made = [super(NumberedTextData, self).val_dataloader() for _ in range(self.loaders)]
        return made[0] if len(made) == 1 else made


class TakesAllAsItComes(MegatronDataSampler):
    """Leaves the samples to the loader's own sampler, and the loader as it is."""

    def transform_dataloader(self, dataloader: DataLoader[Any], consumed_samples: int = 0) -> DataLoader[Any]:
        return dataloader


class OwnData(pl.LightningDataModule):
    """Has what the first script of a user has: a dataset, a sampler of NeMo's, and no state."""

    def __init__(self, samples: int, order: Any = "single", workers: int = 0) -> None:
        super().__init__()
        self.samples = samples
        self.workers = workers
        self.data_sampler = MegatronDataSampler(SEQ_LENGTH, MICRO_BATCH, GLOBAL_BATCH, dataloader_type=order)

    def setup(self, stage: str | None = None) -> None:
        self._train = Numbered(TextWindows(english(), SEQ_LENGTH, self.samples, seed=3))
        self._validation = TextWindows(english(), SEQ_LENGTH, 2 * GLOBAL_BATCH, seed=4)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._train, num_workers=self.workers, collate_fn=default_collate)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._validation, collate_fn=default_collate)


class Shuffled(OwnData):
    """Loads samples in the order of torch's own sampler, which shuffles."""

    def __init__(self, samples: int, seed: int | None = None) -> None:
        super().__init__(samples)
        self.seed = seed
        self.data_sampler = TakesAllAsItComes(SEQ_LENGTH, MICRO_BATCH, GLOBAL_BATCH)

    def train_dataloader(self) -> DataLoader[Any]:
        own = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        return DataLoader(
            self._train, MICRO_BATCH, shuffle=True, generator=own, drop_last=True, collate_fn=default_collate
        )


class CountingData(OwnData):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.starts: list[int] = []

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        self.starts.append(self.trainer.global_step)
        return super().train_dataloader()

    def state_dict(self) -> dict[str, Any]:
        return {"starts": self.starts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.starts = state_dict["starts"]


class TwoLoaders(OwnData):
    """Trains on two loaders at once."""

    def train_dataloader(self) -> Any:
        return {name: super(TwoLoaders, self).train_dataloader() for name in ("one", "other")}
