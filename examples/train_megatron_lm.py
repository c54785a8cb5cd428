"""Trains a small GPT with Megatron-LM's `pretrain`, through faults: an ordinary script with three lines changed.

    checkpointless run --cpu --nproc-per-node 4 examples/train_megatron_lm.py --train-iters 20

The lines are marked; without them this is plain Megatron-LM, and any of its arguments can be added. With `--cpu` it
trains on this machine's CPUs.
"""

import shlex
import sys
from functools import partial

from checkpointless import HPWrapper  # in place of nothing
from checkpointless.megatron.pretrain import pretrain  # in place of: from megatron.training import pretrain

# isort: split
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, get_tokenizer
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

DEFAULTS = shlex.split("""
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --tokenizer-type NullTokenizer --vocab-size 127 --mock-data --split 900,50,50
    --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2
    --weight-decay 0.01 --train-iters 20 --eval-interval 5 --eval-iters 1 --log-interval 1 --seed 1234
    --transformer-impl local --use-distributed-optimizer --num-distributed-optimizer-instances 2 --num-workers 0
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-rope-fusion --no-persist-layer-norm
""")
if not torch.cuda.is_available():
    DEFAULTS += ["--distributed-backend", "gloo"]
sys.argv[1:1] = DEFAULTS  # arguments of the command line win


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def datasets_provider(sizes, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()


datasets_provider.is_distributed = True


def loss_of(mask, output):
    losses, mask = output.float().view(-1), mask.view(-1).float()
    total, count = (losses * mask).sum(), mask.sum().to(torch.int)
    return total, count, {"lm loss": torch.cat([total.detach().view(1), count.view(1)])}


def forward_step(data_iterator, model):
    batch = {
        name: each.to(torch.accelerator.current_accelerator() or "cpu")
        for name, each in next(data_iterator).items()
    }
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_of, batch["loss_mask"])


@HPWrapper()  # in place of nothing
def main():
    args = parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(args),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=model_provider,
    )


if __name__ == "__main__":
    main()
