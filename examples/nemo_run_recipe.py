"""A recipe of NeMo's collection, made recoverable with one line; shrunk here so that it trains on CPUs.

    checkpointless run --cpu --nproc-per-node 4 examples/nemo_run_recipe.py --steps 20

With `--cpu` a Llama 3 of 140,000 parameters trains on this machine; what has to change for that is in `shrink`. On
GPUs none of this is needed: `--model llama3_8b --full-size` trains the recipe as NeMo publishes it.
"""

import argparse
import os

import nemo_run as run
import torch
from nemo.collections import llm
from nemo.collections.llm.gpt.model.base import local_layer_spec

from checkpointless.strategies import enable
from checkpointless.testing.demo.text import ByteTokenizer, TextDataModule

SEQ_LENGTH = 64


TINY = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": SEQ_LENGTH,
    "make_vocab_size_divisible_by": 256,
    # Megatron's own layers and no fused kernels: this needs neither TransformerEngine nor CUDA
    "transformer_layer_spec": local_layer_spec,
    "persist_layer_norm": False,
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "gradient_accumulation_fusion": False,
}


def shrink(recipe):
    """Make a recipe for many GPUs train in seconds on CPU ranks: a tiny model, fp32, Python's manual as text."""
    for name, value in TINY.items():
        setattr(recipe.model.config, name, value)
    # Model and data share one tokenizer: an object that a recipe names twice is made once
    tokenizer = run.Config(ByteTokenizer)
    recipe.model.tokenizer = tokenizer
    recipe.data = run.Config(
        TextDataModule, seq_length=SEQ_LENGTH, micro_batch_size=2, global_batch_size=16, tokenizer=tokenizer
    )
    recipe.optim.config.bf16 = False
    recipe.optim.config.lr = 1e-2
    recipe.optim.lr_scheduler.warmup_steps = 2
    recipe.trainer.accelerator = "cpu"
    recipe.trainer.plugins = None
    recipe.trainer.strategy.context_parallel_size = 1
    recipe.trainer.strategy.pipeline_dtype = torch.float32
    if isinstance(recipe.trainer.strategy.ddp, run.Config):
        recipe.trainer.strategy.ddp.average_in_collective = False
    recipe.resume.restore_config = None  # the weights to fine-tune: there is no checkpoint of so small a model
    recipe.log.ckpt = None
    recipe.trainer.enable_checkpointing = False
    recipe.trainer.limit_val_batches = 0
    recipe.trainer.val_check_interval = 1.0
    recipe.trainer.num_sanity_val_steps = 0
    recipe.trainer.log_every_n_steps = 1


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="llama3_8b", help="a recipe of nemo.collections.llm")
    options.add_argument("--lora", action="store_true", help="fine-tune with LoRA, instead of pretraining")
    options.add_argument("--full-size", action="store_true", help="as NeMo publishes it, on GPUs")
    options.add_argument("--dir", default="nemo_experiments", help="logs and checkpoints")
    options.add_argument("--steps", type=int, default=20)
    args = options.parse_args()

    layout = {
        "num_nodes": int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        "num_gpus_per_node": int(os.environ["LOCAL_WORLD_SIZE"]),
    }
    model = getattr(llm, args.model)
    if args.lora:
        recipe = model.finetune_recipe(name="recoverable", dir=args.dir, peft_scheme="lora", **layout)
    else:
        recipe = model.pretrain_recipe(name="recoverable", dir=args.dir, **layout)
    enable(recipe)  # the one line
    recipe.trainer.max_steps = args.steps  # a recipe is edited as usual, before and after
    if not args.full_size:
        shrink(recipe)
    run.run(recipe, direct=True)


if __name__ == "__main__":
    main()
