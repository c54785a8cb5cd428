"""A job of Hugging Face's Trainer: ``trains.py [setting=value ...]``, with what real ones have.

It accumulates, clips, warms up, logs every second step, evaluates every third, saves every fourth and keeps two
saves. Worker processes draw random numbers. A callback counts, averages and draws. At the end each rank prints what
it has.
"""

import json
import os
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from checkpointless import HPWrapper
from checkpointless.inprocess import active_call_wrapper
from checkpointless.integrations.transformers import train

# On CPU ranks transformers loads an optimizer to "cpu:0", a place that torch does not know.
torch.serialization.register_package(
    30, lambda storage: None, lambda storage, place: storage if place.startswith("cpu:") else None
)

CHOSEN = {name: json.loads(value) for name, _, value in (each.partition("=") for each in sys.argv[1:])}
FAILS, HOLDS = CHOSEN.pop("fails", {}), CHOSEN.pop("holds", False)
SIZE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


class Noisy(torch.utils.data.Dataset):
    def __init__(self, is_noisy: bool) -> None:
        self._is_noisy = is_noisy

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (index + 7 * torch.arange(17)) % 64
        if self._is_noisy:
            row = torch.where(torch.rand(17) < 0.1, torch.randint(0, 64, (17,)), row)
        return {"input_ids": row, "labels": row}


class Counts(TrainerCallback):
    """Counts steps, keeps what was logged, and draws from the training's stream."""

    def __init__(self) -> None:
        self.begun = self.ended = self.evaluated = self.saved = 0
        self.drawn: list[float] = []
        self.average = torch.zeros(2)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begun = 0

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        hold()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begun += 1

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.drawn.append(torch.rand(1).item())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended += 1
        self.average = 0.5 * self.average + state.global_step + torch.rand(2)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluated += 1
        fail("evaluate", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved += 1
        fail("save", state.global_step)


def fail(where: str, step: int) -> None:
    """Raise on rank 1, once, where the setting ``fails`` says so."""
    if os.environ["RANK"] == "1" and FAILS.get(where) == step:
        del FAILS[where]
        raise RuntimeError(f"asked for, in {where}")


def hold() -> None:
    """Keep rank 1 from its first step until another rank has failed, if asked for."""
    call = active_call_wrapper()
    if not HOLDS or os.environ["RANK"] != "1" or call is None or call.generation > 0:
        return
    limit_s = time.monotonic() + 100.0
    while time.monotonic() < limit_s:
        time.sleep(0.01)
    raise AssertionError("no rank has failed")


@HPWrapper()
def main() -> None:
    settings: dict[str, Any] = {
        "output_dir": os.environ["CHECKPOINTLESS_RUN_DIR"] + "/saves",
        "use_cpu": True,
        "max_steps": 16,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 4,
        "save_total_limit": 2,
        "report_to": [],
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "all",
        "seed": 3,
    } | CHOSEN
    resume, is_noisy = settings.pop("resume", None), settings.pop("noisy", False)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZE, num_attention_heads=4, attention_dropout=0.1))
    counts = Counts()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**settings),
        train_dataset=Noisy(is_noisy or settings.get("dataloader_num_workers", 0) > 0),
        eval_dataset=Noisy(False),
        callbacks=[counts],
    )
    result = train(trainer, resume)
    timed = ("runtime", "per_second")
    history = [
        {name: value for name, value in each.items() if not name.endswith(timed)}
        for each in trainer.state.log_history
    ]
    kept = {**vars(counts), "average": counts.average.tolist()}
    print(
        "left", json.dumps([history, kept, trainer.state.num_input_tokens_seen, result.training_loss]), flush=True
    )
    print(f"graphs: {torch._dynamo.utils.counters['stats']['unique_graphs']}", flush=True)


main()
