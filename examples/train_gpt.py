"""Trains a small GPT with NeMo, through faults: an ordinary script with three lines changed.

    checkpointless run --cpu --nproc-per-node 4 examples/train_gpt.py --steps 20

The three lines are marked; without them this is plain NeMo. The rest is what a user writes anyway: a model, a
dataset, a data module, an optimizer and a trainer. With `--cpu` it trains on this machine's CPUs.
"""

import argparse
import os
from pydoc_data.topics import topics

import lightning.pytorch as pl
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec
from nemo.collections.llm.gpt.model.base import local_layer_spec
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.utils.data import DataLoader, Dataset

from checkpointless.callbacks import CheckpointlessCallback
from checkpointless.inprocess import HPWrapper
from checkpointless.strategies import CheckpointlessMegatronStrategy

SEQ_LENGTH = 64
MICRO_BATCH = 2
GLOBAL_BATCH = 16


class Bytes(TokenizerSpec):
    """One token per byte."""

    vocab_size = 256
    bos_id = eos_id = 0

    def text_to_tokens(self, text):
        return [chr(byte) for byte in text.encode()]

    def tokens_to_text(self, tokens):
        return self.ids_to_text(self.tokens_to_ids(tokens))

    def tokens_to_ids(self, tokens):
        return [ord(token) for token in tokens]

    def ids_to_tokens(self, ids):
        return [chr(i) for i in ids]

    def text_to_ids(self, text):
        return list(text.encode())

    def ids_to_text(self, ids):
        return bytes(ids).decode(errors="replace")


class Manual(Dataset):
    """Python's own manual, cut into sequences."""

    def __init__(self):
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self.bytes = torch.tensor(list(text))
        self.mask = torch.ones(1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)  # True: masked

    def __len__(self):
        return (len(self.bytes) - 1) // SEQ_LENGTH

    def __getitem__(self, index):
        window = self.bytes[index * SEQ_LENGTH : (index + 1) * SEQ_LENGTH + 1]
        return {
            "tokens": window[:-1],
            "labels": window[1:],
            "loss_mask": torch.ones(SEQ_LENGTH),
            "position_ids": torch.arange(SEQ_LENGTH),
            "attention_mask": self.mask,
        }


class ManualData(pl.LightningDataModule):
    """Loads the manual; NeMo's sampler distributes the samples to the ranks."""

    def __init__(self):
        super().__init__()
        self.data_sampler = MegatronDataSampler(
            seq_len=SEQ_LENGTH, micro_batch_size=MICRO_BATCH, global_batch_size=GLOBAL_BATCH
        )

    def setup(self, stage=None):
        self.manual = Manual()

    def train_dataloader(self):
        return DataLoader(self.manual)


def gpt_config():
    """A GPT of about 200,000 parameters that needs no TransformerEngine and no CUDA kernel."""
    return llm.GPTConfig(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        seq_length=SEQ_LENGTH,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        make_vocab_size_divisible_by=256,
        transformer_layer_spec=local_layer_spec,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        gradient_accumulation_fusion=False,
        pipeline_dtype=torch.float32,
    )


@HPWrapper()  # 1: after a fault, this function is entered again in the same process
def main():
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--tensor-parallel", type=int, default=1)
    args = options.parse_args()

    optimizer = nl.MegatronOptimizerModule(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, clip_grad=1.0, use_distributed_optimizer=True, bf16=False, fp16=False
        )
    )
    trainer = nl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=args.steps,
        strategy=CheckpointlessMegatronStrategy(  # 2: instead of MegatronStrategy
            tensor_model_parallel_size=args.tensor_parallel,
            pipeline_dtype=torch.float32,
            ddp=DistributedDataParallelConfig(use_distributed_optimizer=True),
        ),
        callbacks=[CheckpointlessCallback()],  # 3
        limit_val_batches=0,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    model = llm.GPTModel(gpt_config(), optim=optimizer, tokenizer=Bytes())
    trainer.fit(model, ManualData())


if __name__ == "__main__":
    main()
