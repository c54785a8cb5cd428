"""A callback that looks for process groups of earlier generations that are still alive."""

import gc
import json
import weakref
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from lightning.pytorch.callbacks import Callback, LambdaCallback

from checkpointless.inprocess import active_call_wrapper

_known: dict[int, list[tuple[str, Any]]] = {}  # by generation, in this process


class OldGroups(Callback):
    """Writes down which old groups are alive after some steps of each generation."""

    def __init__(self, folder: str, after: int = 3) -> None:
        self._path = Path(folder)
        self._after = after
        self._steps = count(1)  # no plain data: it begins anew in each generation

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        groups: Any = c10d._world.pg_map
        _known[self._generation()] = [(each.group_desc, weakref.ref(each)) for each in groups]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if next(self._steps) != self._after:
            return
        gc.collect()
        old = [
            (generation, name)
            for generation, groups in _known.items()
            for name, each in groups
            if generation < self._generation() and each() is not None
        ]
        self._path.mkdir(parents=True, exist_ok=True)
        with (self._path / f"rank-{dist.get_rank()}.jsonl").open("a") as file:
            file.write(json.dumps({"generation": self._generation(), "old": old}) + "\n")

    @staticmethod
    def _generation() -> int:
        call = active_call_wrapper()
        return call.generation if call is not None else 0


class HookedModel(Callback):
    """Adds a hook to the model when training starts, as a user's callback may; twice, the loss would differ."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        layer = next(each for each in pl_module.modules() if type(each).__name__ == "MLP")
        layer.register_forward_hook(lambda module, args, output: (output[0] * 1.5, *output[1:]))


class ChangesInTheMiddle(Callback):
    """Lets a dropout act no more, and freezes parameters, in one step; nothing does so again later."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        if trainer.global_step == 4:
            dropout = next(each for each in pl_module.modules() if isinstance(each, torch.nn.Dropout) and each.p)
            dropout.eval()
            next(each for name, each in pl_module.named_parameters() if name.endswith("bias")).requires_grad_(False)


class FirstWeights(Callback):
    """Keeps the weights that training begins with, and fails if they are trained ones."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        weight = next(pl_module.parameters())
        first = float(weight.sum())
        _first.setdefault("sum", first)
        assert _first["sum"] == first, "the model is trained already"


def lambda_of_first_weights() -> LambdaCallback:
    """Return Lightning's callback that has the hook in an attribute of its own."""
    return LambdaCallback(on_fit_start=FirstWeights().on_fit_start)


_first: dict[str, float] = {}


class NoSecondModel(Callback):
    """Fails if a model is built where one is kept: a second copy of the parameters, if only for a moment."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        config: Any = pl_module.config
        if _built:
            config.configure_model = _must_not_build
        _built.append(config)


_built: list[object] = []


def _must_not_build(*args: object, **kwargs: object) -> None:
    raise AssertionError("a second model is built")


class ClassesOfTE(Callback):
    """Fails if a model has none of TransformerEngine's modules, or a linear layer that is not one of them."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        classes = {type(each).__name__ for each in pl_module.modules()}
        assert {"TEDotProductAttention", "TELayerNormColumnParallelLinear", "LayerNorm"} <= classes, classes
        assert "RowParallelLinear" not in classes


class ChangedTE(Callback):
    """Changes an attribute of one of TransformerEngine's modules when training starts, as a user's callback may."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        layer = next(each for each in pl_module.modules() if type(each).__name__ == "TERowParallelLinear")
        layer.use_bias = not layer.use_bias  # type: ignore[assignment]


class AdaptersOnce(Callback):
    """Fails if training goes on without adapters, with two in one layer, or with other names to be saved."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        names = [name for name, each in pl_module.named_modules() if type(each).__name__ == "LoRALinear"]
        assert names
        assert not any(".to_wrap" in name for name in names), names
        peft: Any = next(each for each in trainer.callbacks if hasattr(each, "params_to_save"))  # type: ignore[attr-defined]
        _saved.setdefault("names", peft.params_to_save)
        assert peft.params_to_save == _saved["names"]
        assert all(".adapter." in name for name in peft.params_to_save)


_saved: dict[str, set[str]] = {}
