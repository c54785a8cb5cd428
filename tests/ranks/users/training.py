"""Run a NeMo training as users write it: three lines of checkpointless, and the features that are asked for.

Features go together in any number. At the end each rank writes down what must be equal to an undisturbed run.
"""

import argparse
import csv
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.llm.gpt.model.base import local_layer_spec
from nemo.lightning.pytorch.callbacks import ModelCheckpoint

from checkpointless.callbacks import CheckpointlessCallback, HPFaultInjectionCallback
from checkpointless.inprocess import HPWrapper
from checkpointless.strategies import CheckpointlessAutoResume, CheckpointlessMegatronStrategy
from checkpointless.testing.demo.text import ByteTokenizer
from tests.ranks.users import defects, end
from tests.ranks.users.callbacks import Averaging, Breaks, EndsSaves, KeepsByHooks, Pace, Probe
from tests.ranks.users.data import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    SEQ_LENGTH,
    CountingData,
    NumberedTextData,
    OwnData,
    Shuffled,
    TwoLoaders,
)
from tests.ranks.users.modules import UNFUSED, CountingGPT, PlateauScheduler
from tests.ranks.users.spoiler import Spoiler

#: ``--features`` takes these words.
FEATURES = (
    "ema",  # an averaging callback
    "earlystop",  # stops when two validations in a row were no better
    "validation",  # validation every second step
    "val-loaders",  # two loaders for validation
    "modelckpt",  # a checkpoint every second step and one at the end
    "monitored",  # the best checkpoints by the validation's loss
    "async-save",  # checkpoints that are written in the background
    "strict-saves",  # a checkpoint that cannot be saved ends the job
    "dated",  # checkpoints in NeMo's folder of the day
    "moe-bias",  # experts with a bias in their router
    "global-aux-loss",  # experts with counters in their router
    "fp16",  # half precision, with a loss scale that grows every third step
    "module-state",  # a module with a pair of checkpoint hooks
    "callback-hooks",  # a callback with a pair of checkpoint hooks
    "own-buffers",  # buffers of each rank's own samples
    "shuffled",  # samples that torch's own sampler shuffles
    "own-generator",  # a sampler with a generator of its own
    "then-validate",  # validation after the fit, by the same trainer
    "own-data",  # a data module without a state
    "epochs",  # two epochs
    "uneven",  # data whose last batch is not whole
    "cyclic",  # NeMo's shuffling sampler
    "workers",  # data-loader workers
    "plateau",  # a rate that follows the validation's loss
    "csv",  # a logger
    "tensorboard",  # another logger
    "max-time",  # a time limit that is far away
    "epoch-metrics",  # what is logged and accumulated over an epoch
    "two-loaders",  # two loaders to train on
    "start-hooks",  # a module and a data module whose state the hooks at the start change
    "overlap",  # reductions of gradients and gathers of parameters that overlap with the passes
)
#: Classes of callbacks that every trainer gets besides those of the features.
more_callbacks: list[type[Callback]] = []
_STEPS_OF_EPOCH = 4
_OWN_DATA = frozenset({"own-data", "epochs", "cyclic", "uneven", "start-hooks", "two-loaders"})


@HPWrapper()
def main() -> None:
    options = parse()
    for fit, steps in enumerate(options.steps):
        # A fit that was over before a fault in the next one ended in what was written down then.
        end.note("fit", fit=fit, end=end.plain(train(options, fit, steps)))
    end.write_end({"random": streams(), "folders": folders()})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, nargs="+", default=[6], help="of each fit")
    parser.add_argument("--features", type=lambda text: [word for word in text.split(",") if word], default=[])
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--validate-every", type=int, default=2, help="steps")
    parser.add_argument("--save-every", type=int, default=2, help="steps")
    parser.add_argument("--saves-end-before", type=int, default=0, help="step that waits for background saves")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that each step waits")
    parser.add_argument("--resume-from", type=Path, help="a checkpoint of NeMo's")
    options = parser.parse_args()
    unknown = sorted(set(options.features) - set(FEATURES))
    if unknown:
        parser.error(f"unknown features: {', '.join(unknown)}")
    return options


def train(options: argparse.Namespace, fit: int, steps: int) -> dict[str, Any]:
    features = frozenset(options.features)
    defects.install()
    end.note("process", fit=fit)
    model = CountingGPT(
        config_of(options, features),
        optim=optimizer_of(options, features),
        tokenizer=ByteTokenizer(),
        fit=fit,
        features=features,
    )
    trainer = trainer_of(options, features, fit, steps)
    data = data_of(options, features)
    if {"modelckpt", "monitored"} & features or options.resume_from:
        log = nl.NeMoLogger(
            log_dir=str(end.run_dir() / "nemo"),
            name=f"fit-{fit}",
            use_datetime_version="dated" in features,
            update_logger_directory=False,
        )
        log.setup(trainer)
    if options.resume_from:
        CheckpointlessAutoResume(resume_from_path=str(options.resume_from)).setup(trainer, model)
    trainer.fit(model, data)
    found = ended(trainer, model)
    if "then-validate" in features:
        found["validated"] = trainer.validate(model, data)
    return found


def config_of(options: argparse.Namespace, features: frozenset[str]) -> Any:
    more: dict[str, Any] = {}
    if {"moe-bias", "global-aux-loss"} & features or options.expert_parallel > 1:
        # Megatron-core 0.15 leaves the bias of a router's linear layer as uninitialised memory.
        more |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": False, "add_bias_linear": False}
    if "moe-bias" in features:
        more |= {
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_bias_update_rate": 0.05,
            "moe_router_load_balancing_type": "none",
        }
    if "global-aux-loss" in features:
        more |= {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
    if "fp16" in features:
        more |= {"fp16": True, "params_dtype": torch.float16, "autocast_dtype": torch.float16}
    return llm.GPTConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        seq_length=SEQ_LENGTH,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        init_method_std=0.05,
        share_embeddings_and_output_weights=False,
        make_vocab_size_divisible_by=256,
        transformer_layer_spec=local_layer_spec,
        **UNFUSED,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float16 if "fp16" in features else torch.float32,
        **more,
    )


def optimizer_of(options: argparse.Namespace, features: frozenset[str]) -> nl.MegatronOptimizerModule:
    config = OptimizerConfig(lr=1e-2, use_distributed_optimizer=True, fp16="fp16" in features)
    scheduler: Any = nl.lr_scheduler.CosineAnnealingScheduler(100, warmup_steps=0, constant_steps=0, min_lr=1e-3)
    if "plateau" in features:
        scheduler = PlateauScheduler(options.validate_every)
    return nl.MegatronOptimizerModule(config, lr_scheduler=scheduler)


def callbacks_of(options: argparse.Namespace, features: frozenset[str], fit: int) -> list[Any]:
    callbacks: list[Any] = [CheckpointlessCallback(), *(each() for each in more_callbacks)]
    if end.SPOILS_ENV in os.environ:
        callbacks.append(Spoiler())
    if "ema" in features:
        callbacks.append(Averaging())
    if "callback-hooks" in features:
        callbacks.append(KeepsByHooks())
    if options.pace:
        callbacks.append(Pace(options.pace))
    if "earlystop" in features:  # no validation after the first is so much better
        callbacks.append(EarlyStopping("val_loss", patience=2, min_delta=10.0))
    if options.saves_end_before:
        callbacks.append(EndsSaves(options.saves_end_before))
    callbacks += [Probe(fit), Breaks(fit, os.environ.get(end.BREAKS_ENV, ""))]
    if {"modelckpt", "monitored"} & features:
        best = "monitored" in features
        callbacks.append(
            ModelCheckpoint(
                monitor="val_loss" if best else None,
                every_n_train_steps=options.save_every,
                save_last=True,
                save_top_k=2 if best else -1,
                filename="users-{step}",
                save_on_train_epoch_end=False,
            )
        )
    elif options.resume_from:  # NeMo resumes only where there is one
        callbacks.append(ModelCheckpoint(monitor=None, every_n_train_steps=10**6, save_last=False, save_top_k=0))
    return callbacks


def loggers_of(features: frozenset[str], fit: int) -> list[Any]:
    kinds: Any = {"csv": partial(CSVLogger, flush_logs_every_n_steps=1), "tensorboard": TensorBoardLogger}
    return [kind(str(end.run_dir() / name), name=f"fit-{fit}") for name, kind in kinds.items() if name in features]


def trainer_of(options: argparse.Namespace, features: frozenset[str], fit: int, steps: int) -> nl.Trainer:
    validates = {"validation", "earlystop", "monitored", "plateau", "val-loaders"} & features
    more: dict[str, Any] = {}
    if "fp16" in features:
        more["plugins"] = nl.MegatronMixedPrecision(
            precision="16-mixed",
            fp16_initial_loss_scale=2.0**10,
            fp16_loss_scale_window=3,
            fp16_hysteresis=1,
            pipeline_dtype=torch.float16,
        )
    if "epochs" in features:
        more["max_epochs"] = 2
    if "max-time" in features:
        more["max_time"] = {"hours": 5}
    return nl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_steps=steps,
        strategy=CheckpointlessMegatronStrategy(
            tensor_model_parallel_size=options.tensor_parallel,
            pipeline_model_parallel_size=options.pipeline_parallel,
            expert_model_parallel_size=options.expert_parallel,
            pipeline_dtype=torch.float16 if "fp16" in features else torch.float32,
            ddp=DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                overlap_grad_reduce="overlap" in features,
                overlap_param_gather="overlap" in features,
            ),
            ckpt_async_save="async-save" in features,
            on_save_error="raise" if "strict-saves" in features else "continue",
        ),
        callbacks=callbacks_of(options, features, fit),
        logger=loggers_of(features, fit) or False,
        val_check_interval=options.validate_every if validates else None,
        check_val_every_n_epoch=None if validates and "epochs" not in features else 1,
        # Lightning counts micro-batches; only NeMo's own data modules have it count steps.
        limit_val_batches=0 if not validates else 1.0 if _OWN_DATA & features else 2,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool({"modelckpt", "monitored"} & features or options.resume_from),
        **more,
    )


def data_of(options: argparse.Namespace, features: frozenset[str]) -> Any:
    workers = 1 if "workers" in features else 0
    if "shuffled" in features:
        ranks = int(os.environ["WORLD_SIZE"])
        return Shuffled(_STEPS_OF_EPOCH * GLOBAL_BATCH // ranks, 5 if "own-generator" in features else None)
    if _OWN_DATA & features:
        samples = _STEPS_OF_EPOCH * GLOBAL_BATCH if "epochs" in features else 50 * GLOBAL_BATCH
        if "uneven" in features:
            samples += 3
        kind = CountingData if "start-hooks" in features else OwnData
        if "two-loaders" in features:
            kind = TwoLoaders
        return kind(samples, "cyclic" if "cyclic" in features else "single", workers=workers)
    return NumberedTextData(
        loaders=2 if "val-loaders" in features else 1,
        seq_length=SEQ_LENGTH,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=GLOBAL_BATCH,
        num_val_samples=32,
        num_workers=workers,
    )


# --- what must be equal -------------------------------------------------------------------------------------------


def ended(trainer: Any, model: Any) -> dict[str, Any]:
    strategy = trainer.strategy
    megatron = strategy.megatron_parallel
    optimizer, shard = strategy.optimizers[0], strategy.journal().state.shard()
    return {
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "parameters": dict(megatron.named_parameters()),
        "buffers": dict(megatron.named_buffers()),
        "optimizer": end.digest(shard[key] for key in sorted(shard, key=str)),
        "callbacks": {
            type(callback).__name__: state_of(callback)
            for callback in trainer.callbacks
            if not isinstance(callback, Timer | HPFaultInjectionCallback | Pace | EndsSaves)
        },
        "module": {
            **({"batches_seen": model.batches_seen} if model.keeps else {}),
            **({"starts": model.starts} if model.counts_starts else {}),
        },
        "data module": {"starts": trainer.datamodule.starts} if model.counts_starts else {},
        "metrics": dict(trainer.callback_metrics),
        "lr": [group["lr"] for group in optimizer.param_groups],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "loss_scale": optimizer.mcore_optimizer.get_loss_scale(),
        "loops": loops(trainer),
        "accumulated": model.accumulated(),
    }


def loops(trainer: Any) -> dict[str, int]:
    epoch = trainer.fit_loop.epoch_loop
    return {
        "batches": epoch.batch_progress.total.completed,
        "batches of the epoch": epoch.batch_progress.current.completed,
        "batches that stepped": epoch._batches_that_stepped,
        "epochs": trainer.fit_loop.epoch_progress.total.completed,
    }


def state_of(callback: Any) -> dict[str, Any]:
    if isinstance(callback, KeepsByHooks):
        return {"batches": callback.batches}
    if isinstance(callback, ModelCheckpoint):
        return {
            "best": callback.best_model_score,
            "best_model_path": Path(callback.best_model_path).name,
            "last_model_path": Path(callback.last_model_path).name,
            "best_k": {Path(path).name: score for path, score in callback.best_k_models.items()},
        }
    state = callback.state_dict()
    return dict(state) if isinstance(state, dict) else {}


def streams() -> dict[str, str]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    found = {"torch": end.digest([torch.get_rng_state()])}
    found["python"] = end.plain(np.frombuffer(repr(random.getstate()).encode(), np.uint8))
    found["numpy"] = end.plain(np.frombuffer(repr(np.random.get_state()).encode(), np.uint8))
    for name, state in get_cuda_rng_tracker().get_states().items():
        found[name] = end.digest([state])
    return found


def folders() -> dict[str, list[str]]:
    """Return which checkpoints, loggers' folders and losses were written; rank 0 looks when all are done."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    if os.environ["RANK"] != "0":
        return {}
    nemo = end.run_dir() / "nemo"
    checkpoints = sorted(
        str(path.relative_to(nemo)) for path in nemo.glob("**/checkpoints/*") if not path.name.startswith(".")
    )
    loggers = [path for name in ("csv", "tensorboard") for path in (end.run_dir() / name).glob("*/*")]
    return {
        "checkpoints": [undated(name) for name in checkpoints],
        "dated": [f"{path.parent.name}/folder" for path in sorted(nemo.glob("*/*")) if path.name[:2] == "20"],
        "loggers": sorted(str(path.relative_to(end.run_dir())) for path in loggers),
        "logged": list(dict.fromkeys(line for path in sorted(loggers) for line in logged(path / "metrics.csv"))),
    }


def logged(path: Path) -> list[str]:
    """Return which losses of which steps are in a CSV logger's file, those of a redone step twice."""
    if not path.exists():
        return []
    with path.open() as file:
        return [
            f"step {row['step']}: {name} {row[name]}"
            for row in csv.DictReader(file)
            for name in ("reduced_train_loss", "val_loss")
            if row.get(name)
        ]


def undated(name: str) -> str:
    """Return a checkpoint's path with ``dated`` in place of the day."""
    return "/".join("dated" if part[:2] == "20" and part.count("-") == 4 else part for part in name.split("/"))
