"""The trainers that the demo can show, each with the program that does a task."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.system.layout import Layout, LayoutError

HEARTBEAT_TIMEOUT_S = 20.0  # a step of the demo takes a tenth of a second; its set-up a few seconds
MOST_RANKS = 32  # more ranks than that, on one machine's CPUs, spend their time waiting for each other
LAYERS, HEADS, _EXPERTS = 4, 4, 4  # of all models, the recipe's among them
MICRO_BATCH, MICRO_BATCHES = 2, 2  # samples of a microbatch, and microbatches of a rank in each step
RECIPE, GLOBAL_BATCH = "tiny_gpt_cpu", 16  # NeMo's recipe, and its samples in a step
_NEMO_EXTRA = "pip install -e '.[nemo]' in a clone"


#: The keys of a layout in NeMo's recipe.
_OVERRIDES = {
    "tp": "strategy.tensor_model_parallel_size",
    "pp": "strategy.pipeline_model_parallel_size",
    "ep": "strategy.expert_model_parallel_size",
    "cp": "strategy.context_parallel_size",
}


class DemoError(ValueError):
    """Raised if the demo cannot run as asked; the message is one line that says what to do."""


@dataclass(frozen=True)
class Task:
    """What a trainer is asked to train."""

    nproc: int
    steps: int
    # parallel sizes by key of the trainer's ``keys``; a missing key means 1
    layout: Mapping[str, int] = field(default_factory=dict)
    dropout: float = 0.0  # dropout probability, in [0, 1)
    holders: int = 2  # number of ranks that hold each shard, where a trainer shards
    workers: int = 0
    checksum: bool = False
    # how many bytes the buffers of a transfer may take; None: as many as by default
    bucket_bytes: int | None = None
    checkpoint_every: int = 0  # optimizer steps between two checkpoints of the trainer's own (0: none)
    checkpoints: Path | None = None

    @property
    def global_batch(self) -> int:
        """Return the samples per step: the recipe's number, rounded up to whole microbatches for each rank."""
        ranks = self.nproc // (self.layout.get("tp", 1) * self.layout.get("pp", 1))
        return math.ceil(GLOBAL_BATCH / (MICRO_BATCH * ranks)) * MICRO_BATCH * ranks

    def overrides(self) -> tuple[str, ...]:
        changed = [
            f"trainer.max_steps={self.steps}",
            f"model.config.hidden_dropout={self.dropout}",
            f"model.config.attention_dropout={self.dropout}",
        ]
        changed += [f"{_OVERRIDES[key]}={size}" for key, size in self.layout.items()]
        if self.global_batch != GLOBAL_BATCH:
            changed.append(f"data.global_batch_size={self.global_batch}")
        if self.holders != 2:
            changed.append(f"strategy.num_distributed_optimizer_instances={self.holders}")
        if self.layout.get("ep", 1) > 1:
            changed += [
                f"model.config.num_moe_experts={_EXPERTS}",
                "model.config.moe_router_topk=2",
                "model.config.moe_grouped_gemm=false",
                # Megatron-core 0.15 leaves the router's bias uninitialised, so the model has no biases.
                "model.config.add_bias_linear=false",
            ]
        if self.bucket_bytes is not None:
            changed.append(f"checkpointless.memory_budget_bytes={self.bucket_bytes}")
        if self.workers:
            changed.append(f"data.num_workers={self.workers}")
        if self.checksum:
            changed.append("checkpointless.enable_checksum=true")
        if self.checkpoint_every:
            changed += [
                "trainer.enable_checkpointing=true",
                "callbacks.checkpoint={_target_: nemo.lightning.pytorch.callbacks.ModelCheckpoint, "
                f"every_n_train_steps: {self.checkpoint_every}, save_last: true, save_top_k: -1, monitor: null, "
                "save_context_on_train_end: false}",
                f"log={{_target_: nemo.lightning.NeMoLogger, log_dir: '{self.checkpoints}', name: tiny_gpt}}",
                "resume={_target_: nemo.lightning.AutoResume, resume_if_exists: true, "
                "resume_ignore_no_checkpoint: true}",
            ]
        return tuple(changed)


@dataclass(frozen=True)
class Trainer:
    """A way to train: NeMo's recipe, or a trainer of :mod:`checkpointless.testing.demo.script`."""

    name: str
    what: str
    keys: tuple[str, ...] = ()  # parallel sizes that a layout may give
    needs: tuple[str, ...] = ("torch",)
    install: str = "pip install torch"
    imports: tuple[str, ...] = ()  # modules that are worth importing once, before the ranks are forked

    def require(self) -> None:
        """Raise ``DemoError`` if something that the trainer needs is not installed."""
        for name in self.needs:
            try:
                found = importlib.util.find_spec(name) is not None
            except ModuleNotFoundError:  # the package that it is in
                found = False
            if not found:
                raise DemoError(f"--trainer {self.name} needs {name}: {self.install}")

    def check(self, task: Task) -> None:
        """Raise ``DemoError`` if a task's ranks cannot be laid out as asked, each shard with two holders."""
        nproc, layout = task.nproc, task.layout
        if not 0.0 <= task.dropout < 1.0:
            raise DemoError(f"--dropout must be at least 0 and below 1, not {task.dropout:g}")
        if not 2 <= nproc <= MOST_RANKS:
            raise DemoError(f"--nproc must be from 2 to {MOST_RANKS}, not {nproc}")
        tensor, pipeline, expert = (layout.get(key, 1) for key in ("tp", "pp", "ep"))
        if _EXPERTS % expert:
            raise DemoError(f"--layout ep={expert}: the model has {_EXPERTS} experts: use 2 or 4")
        if layout.get("cp", 1) > 1:
            raise DemoError(
                f"--layout cp={layout['cp']}: context parallelism needs TransformerEngine's attention, which CPU "
                "ranks do not have: leave it out"
            )
        if tensor > 1 and expert > 1:
            raise DemoError(
                f"--layout tp={tensor},ep={expert}: Megatron trains experts with tensor parallelism "
                "only with sequence parallelism, which its own layers do not have on CPU ranks: use one of the two"
            )
        try:
            instances = 2 if self.keys else 1  # DDP holds the whole state in each rank
            sizes = {"tensor": tensor, "pipeline": pipeline, "expert": expert}
            Layout.on_one_node(nproc, **sizes, instances=instances).check(LAYERS, HEADS)
        except LayoutError as error:
            raise DemoError(f"--nproc {nproc}: {error}") from error

    def layout(self, text: str) -> dict[str, int]:
        """Parse a layout such as ``tp=2,pp=1``; ``DemoError`` if a key or a size is wrong."""
        layout: dict[str, int] = {}
        for part in text.split(",") if text.strip() else ():
            key, _, size = (piece.strip() for piece in part.partition("="))
            if key not in self.keys:
                known = (
                    f"is not one of {', '.join(f'{k}=N' for k in self.keys)}"
                    if self.keys
                    else "is not for this trainer"
                )
                raise DemoError(f"layout {text!r}: {part!r} {known}")
            if key in layout:
                raise DemoError(f"layout {text!r}: {key} is there twice")
            if not size.isascii() or not size.isdecimal() or not 1 <= int(size) <= 10**6:
                raise DemoError(f"layout {text!r}: {key} must be a whole number of at least 1, not {size!r}")
            layout[key] = int(size)
        return layout

    def program(self, task: Task) -> tuple[str, tuple[str, ...]]:
        """Return the module that does a task, and its arguments."""
        if self is _NEMO:
            return "checkpointless.recipes.runner", (RECIPE, *task.overrides())
        options = {
            "--steps": task.steps,
            "--dropout": task.dropout,
            "--tensor": task.layout.get("tp", 1),
            "--pipeline": task.layout.get("pp", 1),
            "--holders": task.holders,
            "--workers": task.workers,
        }
        if task.bucket_bytes is not None:
            options["--bucket-bytes"] = task.bucket_bytes
        arguments = [text for name, value in options.items() for text in (name, str(value))]
        more = ["--checksum"] if task.checksum else []
        return "checkpointless.testing.demo.script", (self.name, *arguments, *more)

    def config(self, task: Task, run_dir: Path, faults: Sequence[str] = ()) -> LaunchConfig:
        """Return the configuration of a job that does a task on CPU ranks and records its steps."""
        module, arguments = self.program(task)
        return LaunchConfig(
            nproc_per_node=task.nproc,
            script=module,
            script_args=arguments,
            module=True,
            run_dir=run_dir,
            cpu=True,
            preload=self.preload(),
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            faults=tuple(faults),
            record_steps=True,
            stream_logs=False,
        )

    def preload(self) -> tuple[str, ...]:
        """Return the names of modules that are worth importing once, before the ranks are forked."""
        if self is not _NEMO:
            return *self.imports, "checkpointless.testing.demo.text", "checkpointless.recovery"
        from checkpointless.recipes.settings import load, preloads_of

        return preloads_of(load(RECIPE, ()))


_FSDP2 = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo")
_PL = ("lightning.pytorch", "checkpointless.strategies.torch_strategies", "checkpointless.callbacks")
_CORE = ("megatron.core.models.gpt", "megatron.core.optimizer", "checkpointless.integrations.megatron.training")
_LIGHTNING_NEEDS = (("lightning",), "pip install lightning")

_NEMO = Trainer("nemo", "A NeMo GPT", ("tp", "pp", "ep", "cp"), ("nemo", "hydra"), _NEMO_EXTRA)
#: By name; the first is the default.
TRAINERS: dict[str, Trainer] = {
    each.name: each
    for each in (
        _NEMO,
        Trainer("ddp", "A GPT in a loop with torch's DistributedDataParallel"),
        Trainer("hsdp", "A GPT in a loop with torch's FSDP2 and replicas", ("tp",), imports=_FSDP2),
        Trainer(
            "megatron",
            "Megatron-core's GPT and distributed optimizer, in a loop",
            ("tp", "pp"),
            ("megatron.core",),
            _NEMO_EXTRA,
            _CORE,
        ),
        Trainer("lightning-ddp", "A GPT with Lightning's DDP strategy", (), *_LIGHTNING_NEEDS, _PL),
        Trainer(
            "lightning-hsdp",
            "A GPT with Lightning's model-parallel strategy: FSDP2 with replicas",
            ("tp",),
            *_LIGHTNING_NEEDS,
            (*_FSDP2, *_PL),
        ),
    )
}
