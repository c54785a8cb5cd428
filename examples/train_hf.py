"""Train with Hugging Face's Trainer: ``checkpointless run --cpu --nproc-per-node 2 examples/train_hf.py``.

``train_hf.diff`` has the lines that make it come through faults.
"""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from checkpointless import HPWrapper
from checkpointless.integrations.transformers import train


class Lines(torch.utils.data.Dataset):
    """Rows of numbers, each of which follows from the one before it."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (index + 7 * torch.arange(17)) % 64
        return {"input_ids": row, "labels": row}


class Print(TrainerCallback):
    """Prints the loss of each step."""

    def on_log(self, args, state, control, logs=None, **more) -> None:
        if "loss" in (logs or {}) and state.is_world_process_zero:
            print(f"step {state.global_step}: loss {logs['loss']:.6f}", flush=True)


@HPWrapper()
def main() -> None:
    """Build everything and train; after a fault this is entered again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train (default: 20)")
    options = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not torch.cuda.is_available(),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=4, attention_dropout=0.1))
    trainer = Trainer(model=model, args=arguments, train_dataset=Lines(), callbacks=[Print()])
    train(trainer)


if __name__ == "__main__":
    main()
