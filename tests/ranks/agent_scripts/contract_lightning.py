"""A Lightning module, a data module and a callback that keep plain data in attributes: ``KIND [once]``.

Each epoch's mean is of a list in an attribute; gradients are clipped by a list (clip) or scaled by an average that
begins as None (average). The callback has a mean of its own rank's losses, in an attribute and in its state.
The validation loader has persistent workers whose dataset draws. With ``once``, the block registers what a process
can register only once.
"""

import enum
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, Dataset

from checkpointless import HPWrapper
from checkpointless.strategies import CheckpointlessDDPStrategy
from checkpointless.system.environment import own_rank

KIND = sys.argv[1]
registered: set[str] = set()


class Mode(enum.Enum):
    EARLY = 1
    LATE = 2


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 48) + torch.rand(8)


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_size=4, num_workers=1, persistent_workers=True)


class Mean(Callback):
    def __init__(self) -> None:
        self.mean: float | None = None
        self.hidden = object()
        self.kept = {"sum": 0.0}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = outputs["loss"].item()
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        self.kept = {"sum": self.kept["sum"] + now}  # a rank's own

    def state_dict(self) -> dict[str, Any]:
        return dict(self.kept)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = dict(state_dict)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
        self.outputs: list[torch.Tensor] = []
        self.norms: list[float] = []
        self.average: float | None = None
        self.mode = Mode.EARLY

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.outputs.append(loss.detach())
        self.trainer.datamodule.taken += len(batch)  # type: ignore[attr-defined]
        if self.global_step == 4:
            self.mode = Mode.LATE
        return loss * (0.5 if self.mode is Mode.LATE else 1.0)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters(), 1e9))
        self.norms.append(norm)
        self.average = norm if self.average is None else 0.9 * self.average + 0.1 * norm
        if KIND == "clip":
            torch.nn.utils.clip_grad_norm_(self.parameters(), sorted(self.norms)[len(self.norms) // 2])
        else:
            for each in self.parameters():
                each.grad = each.grad * self.average if each.grad is not None else None

    def on_train_epoch_end(self) -> None:
        callback: Any = next(each for each in self.trainer.callbacks if isinstance(each, Mean))  # type: ignore[attr-defined]
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        means = torch.stack(self.outputs).mean().item(), callback.mean, callback.kept["sum"]
        print(f"RESULT {own_rank()} {len(self.outputs)} {means!r} {data.taken}", flush=True)
        self.outputs.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def register(name: str) -> None:
    if "once" in sys.argv and name in registered:
        raise ValueError(f"{name} is already registered")
    registered.add(name)


@HPWrapper()
def main() -> None:
    register("model")
    pl.seed_everything(3, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=3,
        val_check_interval=3,
        strategy=CheckpointlessDDPStrategy(),
        logger=False,
        callbacks=[Mean()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), datamodule=Data())


main()
