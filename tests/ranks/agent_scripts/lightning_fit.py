"""Train with Lightning's own strategies, as a user does: ``STEPS STRATEGY [FEATURES]``.

Some features hand the block something past its arguments. The data module's ``setup`` tells the LightningModule of
the data, in an ``attribute``, its ``hparams`` or a ``buffer``. ``outside``: the LightningModule is made outside of
the block; ``late``: rank 1 waits with its update of step 3, too. ``raises-first``: rank 1 raises the first time,
when it has no state yet. With ``check-N`` gradients are checked in every N-th step. ``by-name`` takes a strategy of
Lightning's, which resumes from its own checkpoint after a fault. ``keeps-clip`` and ``keeps-average`` keep plain
data in attributes. With ``once`` a process can enter the block only once.
"""

import enum
import itertools
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import numpy
import torch
from lightning.pytorch import callbacks as stock
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler
from torchmetrics import MeanMetric

from checkpointless import HPWrapper
from checkpointless.inprocess import active_call_wrapper
from checkpointless.recovery import guard
from checkpointless.strategies import CheckpointlessDDPStrategy, CheckpointlessModelParallelStrategy
from checkpointless.system.environment import own_generation, own_run_dir

STEPS, STRATEGY, FEATURES = int(sys.argv[1]), sys.argv[2], frozenset(sys.argv[3:])
CHECKED = [each for each in FEATURES if each.startswith("check-")]
WIDTH, SAMPLES = 30, 45 if os.environ["WORLD_SIZE"] == "2" else 90  # eight batches for a rank in an epoch
KEEPS = FEATURES & {"keeps-clip", "keeps-average"}
PERSISTENT: Any = {"num_workers": 1, "persistent_workers": True} if KEEPS else {}
entries = [0]


class Samples(Dataset[torch.Tensor]):
    first = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = torch.randn(WIDTH, generator=torch.Generator().manual_seed(self.first + index)) + torch.rand(1)
        return drawn + own_generation() if "other-batch" in FEATURES else drawn


class Stream(IterableDataset[torch.Tensor]):
    """Each rank's part of an endless stream, which knows where it stands."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        while True:
            self.place += 1
            yield torch.randn(WIDTH, generator=torch.Generator().manual_seed(self.place * ranks + rank))

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.place = state_dict["place"]


class Shuffled(IterableDataset[torch.Tensor]):
    """A stream of eight batches in an order drawn at its beginning, or for each row in a shuffle buffer."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes += 1
        rows = list(range(24 * self.passes))[-24:]
        random.shuffle(rows)
        held: list[int] = []
        for row in rows:
            held.append(row)
            if len(held) == 5 and "buffer" in FEATURES:
                yield self.sample(held.pop(random.randrange(5)))
            elif "buffer" not in FEATURES:
                yield self.sample(held.pop())
        yield from map(self.sample, held)

    def sample(self, row: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(row))

    def __len__(self) -> int:
        return 24


class OwnBatches(Sampler[list[int]]):
    """Batches of the user's: drawn one by one from the rank's stream, or from what the sampler keeps for itself."""

    def __init__(self) -> None:
        self.passes, self.numpys, self.pythons = 0, numpy.random.default_rng(5), random.Random(7)

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        for _ in range(8):
            if "own-draws" in FEATURES:
                yield [self.pythons.randrange(SAMPLES), *self.numpys.integers(SAMPLES, size=2).tolist()]
            elif "counts" in FEATURES:
                yield random.Random(100 * self.passes + _).sample(range(SAMPLES), 3)
            else:
                yield random.sample(range(SAMPLES), 3)

    def __len__(self) -> int:
        if "endless" in FEATURES:
            raise TypeError("it has no length")
        return 8


class StatefulLoader(DataLoader[torch.Tensor]):
    def state_dict(self) -> dict[str, int]:
        stream: Any = self.dataset
        return stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        stream: Any = self.dataset
        stream.load_state_dict(state_dict)


class PositionedLoader(DataLoader[torch.Tensor]):
    """Says how many batches of the pass it has given, and begins behind as many."""

    given = begins = 0

    def __iter__(self) -> Any:
        self.given, self.begins = self.begins, 0
        batches: Any = self.batch_sampler
        for indices in itertools.islice(batches, self.given, None):
            self.given += 1
            yield self.collate_fn([self.dataset[index] for index in indices])

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given % len(self)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.given = self.begins = state_dict["given"]


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def setup(self, stage: str) -> None:
        module: Any = cast(pl.Trainer, self.trainer).lightning_module
        spread = 1 + float(torch.randn(WIDTH, generator=torch.Generator().manual_seed(3)).std())
        if "attribute" in FEATURES:
            module.scale = spread
        if "hparams" in FEATURES:
            module.hparams.scale = spread
        if "buffer" in FEATURES:
            module.weight.fill_(spread)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        if "stream" in FEATURES:
            return (StatefulLoader if "stateful" in FEATURES else DataLoader)(Stream(), batch_size=3)
        if "shuffled" in FEATURES:
            return DataLoader(Shuffled(), batch_size=3, num_workers=int("workers" in FEATURES))
        kind: Any = PositionedLoader if "positioned" in FEATURES else DataLoader
        options: dict[str, Any] = {"batch_size": 3, "num_workers": int("workers" in FEATURES), **PERSISTENT}
        if "torchdata" in FEATURES:
            from torchdata.stateful_dataloader import StatefulDataLoader
            from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

            kind = StatefulDataLoader
        samples = self.samples()
        if "own-batches" in FEATURES:
            return DataLoader(samples, batch_sampler=OwnBatches(), num_workers=options["num_workers"])
        if "sharded" in FEATURES:
            options["sampler"] = StatefulDistributedSampler(samples, seed=3)
        elif "weighted" in FEATURES:
            drawn = torch.Generator().manual_seed(11)
            options["sampler"] = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, generator=drawn)
        else:
            options["shuffle"] = True
        loader: DataLoader[torch.Tensor] = kind(samples, **options)
        return loader

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        batches: Any = {"batch_sampler": OwnBatches()} if "own-batches" in FEATURES else {"batch_size": 5}
        return DataLoader(self.samples(), **batches, **PERSISTENT)

    def samples(self) -> Samples:
        samples, trainer = Samples(), cast(pl.Trainer, self.trainer)  # it asks for a loader in some epochs only
        samples.first = 100 * trainer.current_epoch + trainer.global_step if "reads" in FEATURES else 0
        return samples


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.scale = 0.0, 1.0
        self.net: Any = None
        self.automatic_optimization = "manual" not in FEATURES
        self.rows = torch.nn.Embedding(3, WIDTH, max_norm=1.0) if "bounds" in FEATURES else None
        self.mean = MeanMetric() if CHECKED else None
        if "buffer" in FEATURES:
            self.register_buffer("weight", torch.ones(()), persistent=False)

    def configure_model(self) -> None:
        if self.net is not None:
            return
        layers = [torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.ReLU(), torch.nn.Dropout(0.1)]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(2 * WIDTH, WIDTH))
        if "frees" in FEATURES:
            self.net[0].requires_grad_(False)
        if STRATEGY == "ddp":
            self.net.append(torch.nn.BatchNorm1d(WIDTH))
            return
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = self.device_mesh
        assert mesh is not None
        if mesh["tensor_parallel"].size() > 1:
            parallelize_module(self.net, mesh["tensor_parallel"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
        over = mesh["data_parallel"] if "fully-sharded" in FEATURES else mesh["replicate", "shard"]
        for layer in (self.net[0], self.net[3], self.net):
            fully_shard(layer, mesh=over)

    def on_train_epoch_start(self) -> None:
        """In one epoch train other parameters than in the others, as schedules for fine-tuning do."""
        if "freezes" in FEATURES and self.current_epoch in (1, 2):
            self.net[0].requires_grad_(self.current_epoch == 2)
        if "frees" in FEATURES and self.current_epoch == 1:
            self.net[0].requires_grad_(True)
        optimizer: Any = self.optimizers()
        if "adds" in FEATURES and self.current_epoch == 1:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        if "exchanges" in FEATURES and self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.AdamW(self.parameters(), lr=1e-3)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer: Any = self.trainer
        if "settings" in FEATURES and trainer.global_step == 4 and trainer.accumulate_grad_batches == 1:
            trainer.accumulate_grad_batches, trainer.gradient_clip_val = 2, 0.05
            trainer.val_check_batch, trainer.log_every_n_steps = 6, 2
            trainer.limit_train_batches = 3  # of a loader that is made later
        if "settings" in FEATURES and trainer.global_step == 12:
            trainer.fit_loop.epoch_loop.max_steps = STEPS - 1
            trainer.gradient_clip_algorithm = GradClipAlgorithmType.VALUE
        if "regroups" in FEATURES and trainer.global_step == 3:
            trainer.accumulate_grad_batches = 2

    def on_validation_end(self) -> None:
        if "freezes" in FEATURES and self.trainer.global_step == 12:
            self.net[3].bias.requires_grad_(False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, torch.Tensor]:
        if self.rows is not None:
            batch = batch + self.rows(torch.arange(len(batch)))
        if "parts" in FEATURES and self.global_step == 0:
            self.net[3].bias.data.copy_(batch.mean(0))
        loss = (self.net(batch) - batch.roll(1, 1)).square().mean()
        if FEATURES & {"attribute", "hparams", "buffer"}:
            loss = loss * self.scale * self.hparams.get("scale", 1.0) * getattr(self, "weight", 1.0)
        if "other-loss" in FEATURES:
            loss = loss * (1 + own_generation())
        if self.mean is not None:
            self.mean.update(loss.detach())
            self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.seen += len(batch) + 0.1 * batch_idx  # ranks alike: a peer's is as good
        if "overflow" in FEATURES and self.global_step == 3 and self.trainer.is_global_zero:
            loss = loss * float("inf")
        self.note("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "mean": batch.mean()}

    def on_after_backward(self) -> None:
        if "other-loss" in FEATURES and self.global_rank == 1 and own_generation() == 0:
            time.sleep(1.0)  # rank 0 has the gradients, too, and keeps its loss meanwhile

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.note("val_loss", (self.net(batch) - batch.roll(1, 1)).square().mean())

    @torch.compiler.disable  # to compile what Lightning logs with takes half a minute
    def note(self, name: str, value: torch.Tensor, **options: Any) -> None:
        self.log(name, value, sync_dist=True, **options)

    def configure_optimizers(self) -> Any:
        if "raises-first" in FEATURES and self.global_rank == 1 and own_generation() == 0:
            raise RuntimeError("the first time")
        if "lbfgs" in FEATURES:
            return torch.optim.LBFGS(self.parameters())
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [
            {"scheduler": steps, "interval": "step"},
            {"scheduler": plateau, "monitor": "train_loss", "interval": "step"},
        ]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if "seldom" in FEATURES and self.trainer.global_step % 3 == 1:
            optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if "twice" in FEATURES:
            optimizer.step(closure=optimizer_closure)
        if "warmup" in FEATURES:  # as Lightning's documentation shows it
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1.0, (self.trainer.global_step + 1) / 5)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen
        if "own-state" in FEATURES:
            checkpoint["rank"] = self.global_rank

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


class Mode(enum.Enum):
    EARLY = 1
    LATE = 2


class KeepingModel(Model):
    """Keeps plain data in attributes.

    Gradients are clipped by a list, or scaled by an average that begins as None; an epoch's mean is of a list, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []
        self.norms: list[float] = []
        self.average: float | None = None
        self.mode = Mode.EARLY

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.outputs.append(loss.detach())
        self.trainer.datamodule.taken += len(batch)  # type: ignore[attr-defined]
        if self.global_step == 4:
            self.mode = Mode.LATE
        return {"loss": loss * (0.5 if self.mode is Mode.LATE else 1.0)}

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters(), 1e9))
        self.norms.append(norm)
        self.average = norm if self.average is None else 0.9 * self.average + 0.1 * norm
        if "keeps-clip" in FEATURES:
            torch.nn.utils.clip_grad_norm_(self.parameters(), sorted(self.norms)[len(self.norms) // 2])
        else:
            for each in self.parameters():
                each.grad = each.grad * self.average if each.grad is not None else None


class Mean(Callback):
    """Keeps means of its own rank's losses, in an attribute and in its state, and tells at the end of an epoch."""

    def __init__(self) -> None:
        self.mean: float | None = None
        self.hidden = object()
        self.kept = {"sum": 0.0}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = outputs["loss"].item()
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        self.kept = {"sum": self.kept["sum"] + now}  # a rank's own

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        means = torch.stack(pl_module.outputs).mean().item(), self.mean, self.kept["sum"]
        data = trainer.datamodule
        print(f"RESULT {trainer.global_rank} {len(pl_module.outputs)} {means!r} {data.taken}", flush=True)
        pl_module.outputs.clear()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.kept)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = dict(state_dict)


class Norms(Callback):
    """Keeps sums of what it sees in hooks before and after the update."""

    def __init__(self) -> None:
        self.norm = self.means = 0.0
        self.passes = 0  # no state of its own

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.passes += 1

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            grad: Any = parameter.grad
            if grad is not None:
                total = float((grad.full_tensor() if hasattr(grad, "full_tensor") else grad).sum())
                self.norm += total if math.isfinite(total) else 1.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.means += len(outputs)

    def state_dict(self) -> dict[str, Any]:
        return {"norm": self.norm, "means": self.means}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.norm, self.means = state_dict["norm"], state_dict["means"]


class StoppedSaves(ModelCheckpoint):
    """A save after which the rank that writes it is killed, or within which another one raises, once."""

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        call = active_call_wrapper()
        due = trainer.global_step == 4 and call is not None and call.generation == 0
        if due and "raises-in-save" in FEATURES and trainer.global_rank == 1:
            raise RuntimeError("in a save")
        super()._save_checkpoint(trainer, filepath)
        if due and "killed-in-save" in FEATURES and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Swaps(Callback):
    """Has other weights in the places of the trained ones during a validation."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(2.0)
        trainer.strategy.barrier()  # whoever is interrupted from here on has others

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.div_(2.0)

    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 4:
            raise RuntimeError("in a validation")


def stock_callbacks(folder: Path) -> list[Callback]:
    """Return Lightning's own callbacks that one training may have together."""
    given: list[Callback] = []
    if "stock" in FEATURES:
        given += [
            stock.EarlyStopping("train_loss", min_delta=10.0, patience=2, check_on_train_epoch_end=True),
            stock.LearningRateMonitor("step", log_momentum=True),
            stock.LambdaCallback(on_train_batch_end=lambda trainer, module, *rest: module.log("mine", 1.0)),
            *(kind() for kind in (stock.ModelSummary, stock.RichModelSummary, stock.BasePredictionWriter)),
            stock.Timer("00:01:00:00"),
            stock.DeviceStatsMonitor(cpu_stats=True),
            stock.ThroughputMonitor(len),
            stock.OnExceptionCheckpoint(folder / "raised"),
            stock.RichProgressBar() if "rich" in FEATURES else stock.TQDMProgressBar(),
        ]
    if "scheduled" in FEATURES:
        given.append(stock.GradientAccumulationScheduler({1: 2, 2: 4}))
    if "averages" in FEATURES:
        given.append(stock.StochasticWeightAveraging(1e-2, swa_epoch_start=1))
    if "prunes" in FEATURES:
        given.append(stock.ModelPruning("l1_unstructured", amount=0.1))
    return given


def strategy_of(name: str) -> Any:
    if "by-name" in FEATURES:
        return name
    check: Any = {"sdc_check_every": int(CHECKED[0].partition("-")[2])} if CHECKED else {}
    if name == "ddp":
        static, unused = "static" in FEATURES, "freezes" in FEATURES
        return CheckpointlessDDPStrategy(static_graph=static, find_unused_parameters=unused, **check)
    tensors, replicas = (2 if name == "hsdp-tp" else 1), (1 if "fully-sharded" in FEATURES else 2)
    return CheckpointlessModelParallelStrategy(4, tensors, replicas=replicas, **check)


def wait_after_the_vote() -> None:
    """Keep rank 1 from its update of step 3, of which all ranks have the gradients, until another rank fails."""
    original = guard.vote

    def vote(ends: bool = False) -> bool:
        said = original(ends)
        call = active_call_wrapper()
        while os.environ["RANK"] == "1" and call is not None and (call.generation, call.steps.making) == (0, 3):
            time.sleep(0.01)
        return said

    guard.vote = vote


def model_from_outside() -> Model:
    pl.seed_everything(7)
    model = Model()
    model.configure_model()
    return model


if "late" in FEATURES:
    wait_after_the_vote()
outside = model_from_outside() if "outside" in FEATURES else None


@HPWrapper()
def main() -> None:
    entries[0] += 1
    if "once" in FEATURES and entries[0] > 1:
        raise ValueError("the model is already registered")
    pl.seed_everything(7 + int(os.environ["RANK"]) * ("seeded-apart" in FEATURES), verbose=False)
    folder = own_run_dir() or Path()
    more: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 2 * ("reloads" in FEATURES)}
    if "fp16" in FEATURES:
        more["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_interval=3))
    elif "bf16" in FEATURES:
        more["precision"] = "bf16-mixed"
    norms = Norms()
    callbacks: list[Callback] = [norms, *([Swaps()] if "swaps" in FEATURES else []), *stock_callbacks(folder)]
    callbacks += [Mean()] if KEEPS else []
    if "waits" in FEATURES:
        from tests.ranks.job_callbacks import Waits

        callbacks.append(Waits())
    if "saves" in FEATURES:
        options: Any = {"every_n_train_steps": 2, "save_top_k": 2, "monitor": "step", "mode": "max"}
        callbacks.append(StoppedSaves(folder / "saved", save_last="link", **options))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=strategy_of(STRATEGY),
        max_steps=STEPS,
        accumulate_grad_batches=2 if "accumulate" in FEATURES else 1,
        gradient_clip_val=None if STRATEGY == "hsdp-tp" or "manual" in FEATURES else 1.0,
        use_distributed_sampler="own-batches" not in FEATURES,
        val_check_interval=4 if "validation" in FEATURES else None,
        limit_val_batches=2 if "validation" in FEATURES else 0,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        logger=CSVLogger(folder / "csv"),
        enable_checkpointing=bool({"saves", "stock"} & FEATURES),
        enable_progress_bar="stock" in FEATURES,
        enable_model_summary=False,
        log_every_n_steps=1,
        **more,
    )
    model: Any = outside or (KeepingModel() if KEEPS else Model())
    if "compiled" in FEATURES:
        model = torch.compile(model, backend="aot_eager")
    trainer.fit(model, Data(), ckpt_path="last" if "by-name" in FEATURES else None)
    if CHECKED:
        metrics = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        print(f"ends with {norms.passes} {model.seen!r} {metrics}", flush=True)
    if "compiled" in FEATURES:
        print(f"graphs: {torch._dynamo.utils.counters['stats']['unique_graphs']}")


main()
