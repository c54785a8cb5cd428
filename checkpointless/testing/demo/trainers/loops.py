"""Loops of one's own, Bridge and Lightning: each is a script of ``checkpointless.testing.demo.scripts``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from checkpointless.faults.chaos import (
    BRIDGE,
    DATA_PARALLEL,
    LIGHTNING,
    LIGHTNING_SHARDED,
    MEGATRON,
    SHARDED,
    Scope,
)
from checkpointless.testing.demo.trainers.trainer import NEMO_EXTRA, DemoError, Program, Task, Trainer, divide

HEADS, LAYERS = 4, 4  # of the scripts' models


class ScriptedTrainer(Trainer):
    """A trainer whose script takes the options of ``checkpointless.testing.demo.scripts.options``.

    Args:
        name: name on the command line.
        what: what is trained, and by whom, for people.
        script: name of the script.
        scope: cases that chaos may draw.
        corpus: what it is trained on.
        keys: parallel sizes that a layout may give.
        more: further arguments of the script.
        needs: modules that have to be installed.
        install: how to install them.
        preload: modules that are worth importing once.
    """

    def __init__(
        self,
        name: str,
        what: str,
        script: str,
        scope: Scope,
        *,
        corpus: str = Trainer.corpus,
        keys: tuple[str, ...] = (),
        more: tuple[str, ...] = (),
        needs: tuple[str, ...] = ("torch",),
        install: str = "pip install torch",
        preload: tuple[str, ...] = (),
    ) -> None:
        self.name, self.what, self.scope, self.keys = name, what, scope, keys
        self.corpus = corpus
        self.needs, self.install = needs, install
        self._script = f"checkpointless.testing.demo.scripts.{script}"
        self._more, self._preload = more, preload

    def check(self, nproc: int, layout: Mapping[str, int]) -> None:
        """Check that ``nproc`` ranks can be laid out as asked, and share the script's model."""
        tensor, pipeline = layout.get("tp", 1), layout.get("pp", 1)
        for key, what, number in (("tp", "attention heads", HEADS), ("pp", "layers", LAYERS)):
            if number % layout.get(key, 1):
                raise DemoError(
                    f"--layout {key}={layout[key]}: the model has {number} {what}, which {layout[key]} "
                    "cannot share: use 1, 2 or 4"
                )
        divide(nproc, tensor * pipeline, layout, holders=2 if self.keys else 1)
        if nproc < 2:
            raise DemoError("--nproc 1: a rank alone has no replica: use 2 or more")

    def program(self, task: Task) -> Program:
        """Return the script with the options of ``task``."""
        options = {
            "--steps": task.steps,
            "--dropout": task.dropout,
            "--tensor": task.layout.get("tp", 1),
            "--pipeline": task.layout.get("pp", 1),
            "--holders": task.holders,
            "--workers": task.workers,
        }
        arguments = [text for name, value in options.items() for text in (name, str(value))]
        if task.bucket_bytes is not None:
            arguments += ["--bucket-bytes", str(task.bucket_bytes)]
        if task.checksum:
            arguments.append("--checksum")
        return Program(self._script, (*arguments, *self._more))

    def preload(self) -> Sequence[str]:
        """Return the names of the modules that the script imports."""
        return (*self._preload, "checkpointless.testing.demo.scripts.byte_model", "checkpointless.recovery")


_FSDP2 = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo")
_LIGHTNING = ("lightning.pytorch", "checkpointless.strategies.torch_strategies", "checkpointless.callbacks")
_MEGATRON = ("megatron.core.models.gpt", "megatron.core.optimizer", "checkpointless.integrations.megatron.training")

DDP = ScriptedTrainer("ddp", "A GPT in a loop with torch's DistributedDataParallel", "ddp", DATA_PARALLEL)
HSDP = ScriptedTrainer(
    "hsdp",
    "A GPT in a loop with torch's FSDP2 and replicas",
    "hsdp",
    SHARDED,
    keys=("tp",),
    preload=_FSDP2,
)
MEGATRON_LOOP = ScriptedTrainer(
    "megatron",
    "Megatron-core's GPT and distributed optimizer, in a loop",
    "megatron",
    MEGATRON,
    keys=("tp", "pp"),
    needs=("megatron.core",),
    install=NEMO_EXTRA,
    preload=_MEGATRON,
)
BRIDGE_GPT = ScriptedTrainer(
    "bridge",
    "Megatron-Bridge's GPT",
    "bridge",
    BRIDGE,
    corpus="made-up text",
    keys=("tp", "pp"),
    needs=("megatron.bridge",),
    install="see docs/megatron-bridge.md, which says how; it and NeMo need environments of their own",
    preload=("checkpointless.integrations.megatron_bridge",),
)
LIGHTNING_DDP = ScriptedTrainer(
    "lightning-ddp",
    "A GPT with Lightning's DDP strategy",
    "lightning",
    LIGHTNING,
    more=("--strategy", "ddp"),
    needs=("lightning",),
    install="pip install lightning",
    preload=_LIGHTNING,
)
LIGHTNING_HSDP = ScriptedTrainer(
    "lightning-hsdp",
    "A GPT with Lightning's model-parallel strategy: FSDP2 with replicas",
    "lightning",
    LIGHTNING_SHARDED,
    keys=("tp",),
    more=("--strategy", "hsdp"),
    needs=("lightning",),
    install="pip install lightning",
    preload=(*_FSDP2, *_LIGHTNING),
)
