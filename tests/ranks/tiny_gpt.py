"""Train the tiny recipe on a rank of the tests, and tell what came out of it."""

import hashlib
import os
import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback

from checkpointless.recipes import runner


def train(overrides: list[str], times: int = 1) -> list[dict[str, Any]]:
    """Train the tiny recipe `times` times in this process, and return what each run ended in."""
    return [_train_once(overrides, attempt) for attempt in range(times)]


def _train_once(overrides: list[str], attempt: int) -> dict[str, Any]:
    from megatron.core import parallel_state

    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + attempt)
    recorder = Recorder()
    config = runner.load("tiny_gpt_cpu", ["checkpointless.enabled=false", *overrides])
    runner.prepare_process()
    job = runner.build(config)
    job.optim.connect(job.model)
    job.trainer.callbacks.append(recorder)
    job.trainer.fit(job.model, job.data)
    result = {
        "steps": job.trainer.global_step,
        "losses": recorder.losses,
        "rng_at_start": recorder.rng_at_start,
        "rng": rng_digests(),
        "samples": recorder.samples,
        "params": _digest(job.trainer.strategy.megatron_parallel.parameters()),
        "optimizer": _optimizer_digest(job.trainer.optimizers[0]),
        "lr": job.trainer.optimizers[0].param_groups[0]["lr"],
        "replica_group": torch.distributed.get_process_group_ranks(
            parallel_state.get_inter_distributed_optimizer_instance_group()
        ),
        "data_group": torch.distributed.get_process_group_ranks(parallel_state.get_data_parallel_group()),
        "consumed_samples": job.data.state_dict()["consumed_samples"],
    }
    torch.distributed.destroy_process_group()
    parallel_state.destroy_model_parallel()
    return result


class Recorder(Callback):
    """Notes the loss of every step, the samples that were read and the random streams at the start."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.samples: list[int] = []
        self.rng_at_start: dict[str, str] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.rng_at_start = rng_digests()
        dataset = trainer.train_dataloader.dataset
        base: Any = type(dataset)

        class Recorded(base):
            def __getitem__(inner, index: int) -> dict[str, torch.Tensor]:
                self.samples.append(index)
                return base.__getitem__(inner, index)

        dataset.__class__ = Recorded

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["reduced_train_loss"]).hex())


def rng_digests() -> dict[str, str]:
    """Return a digest of every random stream of this rank."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    streams = {
        "python": repr(random.getstate()).encode(),
        "numpy": repr(np.random.get_state()).encode(),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes(),
    }
    for name, state in get_cuda_rng_tracker().get_states().items():
        streams[name] = state.numpy().tobytes()
    return {name: hashlib.sha256(state).hexdigest()[:16] for name, state in streams.items()}


def _digest(tensors: Any) -> str:
    joined = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(joined).hexdigest()[:16]


def _optimizer_digest(optimizer: Any) -> str:
    mcore = optimizer.mcore_optimizer
    tensors = []
    for inner in getattr(mcore, "chained_optimizers", [mcore]):
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                tensors.append(parameter)
                state = inner.optimizer.state[parameter]
                tensors += [state[name] for name in sorted(state) if torch.is_tensor(state[name])]
    return _digest(tensors)
