"""Train a GPT with Megatron-Bridge through faults: ``STEPS KEY=VALUE...``.

``tp``, ``pp``, ``instances``, ``bf16``, ``fp16``, ``overlap``, ``batch`` (global), ``evaluate`` (interval),
``log`` (interval), ``workers``: each a number; ``data`` is ``mock``, ``single``, ``cyclic`` or ``batch``;
``save=FOLDER``, in the run's, saves every second step. ``tune=FOLDER`` begins with the weights of a checkpoint,
and ``sft=FOLDER`` takes its samples from that folder's files, all of one length with ``pad``; ``epochs`` is how
often it takes each, whatever ``STEPS`` says. ``state`` declares what a callback and the forward step count.
``break=EVENT:KIND:RANK:STEP`` has one rank raise or die at an event of Bridge's.
"""

import dataclasses
import functools
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

from checkpointless import CheckpointManager, HPCallWrapper, HPWrapper, Value
from checkpointless.integrations.megatron_bridge import finetune, pretrain
from checkpointless.recovery import NeighborMemory

# isort: split
import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.bridge.training import checkpointing
from megatron.bridge.training import config as bridge
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.gpt_step import forward_step

STEPS, LENGTH, VOCABULARY, SAMPLES = int(sys.argv[1]), 32, 128, 44
ASKED = dict(each.split("=", 1) for each in sys.argv[2:])
SAVE = os.path.join(os.environ["CHECKPOINTLESS_RUN_DIR"], ASKED["save"]) if "save" in ASKED else None
INSTANCES = int(ASKED.get("instances", 2))
TIERS = [NeighborMemory(overlap=False)] if INSTANCES == 1 else []


def number(name: str, default: int = 0) -> int:
    return int(ASKED.get(name, default))


PRECISION: dict[str, Any] = {name: bool(number(name)) for name in ("bf16", "fp16")}


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples with noise, which is drawn from the streams of the process that makes them."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        clean = torch.arange(index, index + LENGTH + 1) * 7 % VOCABULARY
        tokens = (clean + torch.randint(3, clean.shape)) % VOCABULARY
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(LENGTH),
            "position_ids": torch.arange(LENGTH),
            "attention_mask": torch.ones(1, LENGTH, LENGTH, dtype=torch.bool).triu(1),
        }


@dataclass
class NoisyData(bridge.DatasetProvider):  # type: ignore[misc]
    """Data of one's own, in which each pass has five and a half global batches."""

    seq_length: int = LENGTH
    skip_getting_attention_mask_from_dataset: bool = False

    def build_datasets(self, context: Any) -> Any:
        endless = self.dataloader_type == "single"
        return tuple(
            Noisy(wanted if endless else SAMPLES)
            for wanted in (context.train_samples, context.valid_samples, context.test_samples)
        )


class Counted(Callback):  # type: ignore[misc]
    """Counts what happens in steps, together with the forward step. What it does must not be done twice."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.mean: Any = Value(0.0)

    def state(self) -> dict[str, Any]:
        return {"events": self.events, "mean": self.mean}

    def on_train_step_start(self, context: Any) -> None:
        self.events.append(f"start {context.state.train_state.step}")

    def on_train_step_end(self, context: Any) -> None:
        self.events.append(f"end {context.state.train_state.step}")

    def forward_step(self, state: Any, iterator: Any, model: Any, *more: Any) -> Any:
        output, loss_of = forward_step(state, iterator, model, *more)

        def counted(out: Any) -> Any:
            loss, *rest = loss_of(out)
            scaled = loss * (1 + self.mean.value / 100)
            self.mean.value = 0.5 * self.mean.value + 0.5 * float(loss) / max(1, loss.numel())
            return scaled, *rest

        return output, counted


class Break(Callback):  # type: ignore[misc]
    """Has one rank fail at an event, in the first generation."""

    def __init__(self, call: HPCallWrapper) -> None:
        self._call = call
        asked = ASKED.get("break", "none::0:0").split(":")
        self._event, self._kind = asked[:2]
        self._rank, self._step = map(int, asked[2:])

    def at(self, event: str, step: int) -> None:
        asked = self._event, self._rank, self._step
        if self._call.generation or (event, int(os.environ["RANK"]), step) != asked:
            return
        print(f"breaks at {event} after step {step}", flush=True)
        if self._kind == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"asked for at {event}")

    def on_eval_step_start(self, context: Any) -> None:
        self.at("eval", context.state.train_state.step)

    def on_test_step_start(self, context: Any) -> None:
        self.at("test", context.state.train_state.step)

    def on_train_step_end(self, context: Any) -> None:
        self.at("end", context.state.train_state.step)

    def in_saves(self) -> None:
        """Fail before what a save writes is gathered, or when all is written and nobody has been told."""
        for name, event in (("generate_state_dict", "save"), ("save_sharded_modelopt_state", "saved")):
            original = getattr(checkpointing, name)
            while hasattr(original, "__wrapped__"):
                original = original.__wrapped__
            setattr(checkpointing, name, self._failing(original, event))

    def _failing(self, original: Any, event: str) -> Any:
        @functools.wraps(original)
        def failing(*args: Any, **kwargs: Any) -> Any:
            self.at(event, self._call.parameter_update_lock.committed)
            return original(*args, **kwargs)

        return failing


def model() -> GPTModelProvider:
    dtype = torch.bfloat16 if number("bf16") else torch.float16 if number("fp16") else torch.float32
    return GPTModelProvider(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        seq_length=LENGTH,
        tensor_model_parallel_size=number("tp", 1),
        pipeline_model_parallel_size=number("pp", 1),
        pipeline_dtype=dtype,
        params_dtype=dtype,
        **PRECISION,
        transformer_layer_spec=local_layer_spec,
        attention_dropout=0.1,
        hidden_dropout=0.1,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        cross_entropy_loss_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )


def data() -> Any:
    kind = ASKED.get("data", "mock")
    common: dict[str, Any] = {"num_workers": number("workers"), "pin_memory": False, "seq_length": LENGTH}
    if "sft" in ASKED:
        common["dataset_kwargs"] = {"pad_to_max_length": bool(number("pad"))}
        common["dataloader_type"] = "batch" if kind == "mock" else kind
        return bridge.FinetuningDatasetConfig(dataset_root=ASKED["sft"], do_test=False, **common)
    if kind != "mock":
        return NoisyData(dataloader_type=kind, **common)
    return bridge.MockGPTDatasetConfig(
        random_seed=1234,
        split="900,50,50",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
        skip_getting_attention_mask_from_dataset=False,
        dataloader_type="single",
        num_dataset_builder_threads=1,
        **common,
    )


def tokenizer() -> bridge.TokenizerConfig:
    known = {field.name for field in dataclasses.fields(bridge.TokenizerConfig)}
    older = {"legacy_tokenizer": "sft" in ASKED} if "legacy_tokenizer" in known else {}
    if "sft" in ASKED and not older:  # the null tokenizer cannot prepare samples any more
        return bridge.TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=f"{ASKED['sft']}/tokenizer"
        )
    return bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY, **older)


def configuration() -> bridge.ConfigContainer:
    overlap = bool(number("overlap"))
    distributed = {"use_distributed_optimizer": True, "overlap_param_gather": overlap}
    evaluate = number("evaluate")
    return bridge.ConfigContainer(
        model=model(),
        dataset=data(),
        train=bridge.TrainingConfig(
            **({"num_epochs": number("epochs")} if "epochs" in ASKED else {"train_iters": STEPS}),
            global_batch_size=number("batch", 8),
            micro_batch_size=1,
            eval_interval=evaluate or 1000,
            eval_iters=2 if evaluate else 0,
        ),
        optimizer=bridge.OptimizerConfig(
            lr=1e-3, min_lr=1e-4, weight_decay=0.01, initial_loss_scale=2.0**24, **distributed, **PRECISION
        ),
        ddp=bridge.DistributedDataParallelConfig(
            num_distributed_optimizer_instances=INSTANCES, overlap_grad_reduce=overlap, **distributed
        ),
        scheduler=bridge.SchedulerConfig(
            lr_decay_style="cosine",
            lr_decay_iters=20,
            lr_warmup_iters=2,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            override_opt_param_scheduler=True,
        ),
        logger=bridge.LoggerConfig(log_interval=number("log", 1)),
        tokenizer=tokenizer(),
        checkpoint=bridge.CheckpointConfig(
            save=SAVE, load=SAVE, save_interval=2 if SAVE else None, pretrained_checkpoint=ASKED.get("tune") or None
        ),
        rng=bridge.RNGConfig(seed=1234),
        dist=bridge.DistributedInitConfig(distributed_backend="gloo"),
    )


@HPWrapper(checkpoint_manager=CheckpointManager(tiers=TIERS))
def main(caller: HPCallWrapper) -> None:
    broken = Break(caller)
    broken.in_saves()
    if "state" in ASKED:
        counted = Counted()
        pretrain(configuration(), counted.forward_step, [broken, counted], state=counted.state())
        print(f"events: {counted.events}", flush=True)
    else:
        (finetune if ASKED.get("tune") else pretrain)(configuration(), forward_step, [broken])
