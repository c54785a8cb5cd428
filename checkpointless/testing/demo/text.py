"""The corpus for NeMo: a tokenizer of bytes and a data module."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from megatron.core.num_microbatches_calculator import update_num_microbatches
from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec
from nemo.lightning.data import WrappedDataLoader
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.utils.data import default_collate

from checkpointless.testing.demo.corpus import TextWindows, english

_BYTES = 256


class ByteTokenizer(TokenizerSpec):
    """Tokenizer with one token per UTF-8 byte and three special tokens after them: begin, end and padding."""

    bos_id = _BYTES
    eos_id = _BYTES + 1
    pad_id = _BYTES + 2
    vocab_size = _BYTES + 3

    @property
    def vocab(self) -> dict[str, int]:
        """All tokens and their ids."""
        return {self.ids_to_tokens([i])[0]: i for i in range(self.vocab_size)}

    def text_to_tokens(self, text: str) -> list[str]:
        """Return one two-digit hex token per byte of `text`."""
        return self.ids_to_tokens(self.text_to_ids(text))

    def tokens_to_text(self, tokens: Sequence[str]) -> str:
        """Return the text of `tokens`; special tokens and broken UTF-8 are left out."""
        return self.ids_to_text(self.tokens_to_ids(tokens))

    def tokens_to_ids(self, tokens: Sequence[str]) -> list[int]:
        """Return the id of each token."""
        special = {"<s>": self.bos_id, "</s>": self.eos_id, "<pad>": self.pad_id}
        return [special[token] if token in special else int(token, 16) for token in tokens]

    def ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the token of each id."""
        special = {self.bos_id: "<s>", self.eos_id: "</s>", self.pad_id: "<pad>"}
        return [special.get(i, f"{i:02x}") for i in ids]

    def text_to_ids(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of `text`."""
        return list(text.encode())

    def ids_to_text(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; special tokens and broken UTF-8 are left out."""
        return bytes(i for i in ids if i < _BYTES).decode(errors="ignore")


class TextDataModule(pl.LightningDataModule):
    """NeMo data module with Python's help topics, in the manner of `llm.PreTrainingDataModule`.

    The position in the data is the number of consumed samples and nothing else: `state_dict()` returns it and
    `load_state_dict()` accepts it in any layout.

    Args:
        num_train_samples: samples before the data ends; None: as many as `trainer.max_steps` needs.
        num_val_samples: samples of the validation set, which is the last tenth of the text.
        num_workers: number of data-loader workers that read ahead; 0: the training process reads.
        persistent_workers: whether to keep the data-loader workers from one epoch to the next.
        pin_memory: whether to use page-locked batches; for CUDA only.
        tokenizer: tokenizer with one token per byte; None: `ByteTokenizer()`.
    """

    def __init__(
        self,
        seq_length: int = 64,
        micro_batch_size: int = 1,
        global_batch_size: int = 8,
        num_train_samples: int | None = None,
        num_val_samples: int = 64,
        seed: int = 1234,
        num_workers: int = 0,
        persistent_workers: bool = False,
        pin_memory: bool = False,
        tokenizer: TokenizerSpec | None = None,
    ) -> None:
        super().__init__()
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.num_train_samples = num_train_samples
        self.num_val_samples = num_val_samples
        self.seed = seed
        self.num_workers = num_workers
        self.persistent_workers = persistent_workers
        self.pin_memory = pin_memory
        self.tokenizer = tokenizer or ByteTokenizer()
        self.init_global_step = 0
        self.data_sampler = MegatronDataSampler(
            seq_len=seq_length, micro_batch_size=micro_batch_size, global_batch_size=global_batch_size
        )

    def setup(self, stage: str = "") -> None:
        """Cut the text into windows; every rank does so, which takes milliseconds."""
        samples = self.num_train_samples
        if samples is None:
            # One step more than is trained: NeMo refuses to set up data with nothing left to consume, and a fault
            # after the last step sets up the data once again.
            samples = (self._attached().max_steps + 1) * self.global_batch_size
        text = english()
        split = len(text) * 9 // 10
        self._train = TextWindows(text[:split], self.seq_length, samples, self.seed)
        self._validation = TextWindows(text[split:], self.seq_length, self.num_val_samples, self.seed)

    def train_dataloader(self) -> WrappedDataLoader:
        """Return a loader of the training samples, from the first one that was not consumed."""
        return self._dataloader(self._train, "train")

    def val_dataloader(self) -> WrappedDataLoader:
        """Return a loader of the validation samples."""
        return self._dataloader(self._validation, "validation")

    def state_dict(self) -> dict[str, Any]:
        """Return the number of samples consumed since the start of training."""
        steps = self._attached().global_step - self.init_global_step
        return {"consumed_samples": self.data_sampler.compute_consumed_samples(steps)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume after the samples that `state_dict` says were consumed."""
        consumed_samples = state_dict["consumed_samples"]
        self.data_sampler.init_consumed_samples = consumed_samples
        self.data_sampler.prev_consumed_samples = consumed_samples
        self.data_sampler.if_first_step = 1
        update_num_microbatches(consumed_samples=consumed_samples, consistency_check=False)

    def _dataloader(self, dataset: TextWindows, mode: str) -> WrappedDataLoader:
        # `step_i` of NeMo's steps is the trainer's: the step that the sampler counts from has to move with it.
        self.init_global_step = self._attached().global_step
        self.data_sampler.init_global_step = self.init_global_step
        return WrappedDataLoader(
            mode=mode,
            dataset=dataset,
            num_workers=self.num_workers,
            persistent_workers=self.persistent_workers,
            pin_memory=self.pin_memory,
            collate_fn=default_collate,
        )

    def reconfigure_limit_batches(self) -> None:
        """Count `limit_train_batches` and `limit_val_batches` in microbatches, as NeMo's loops do."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from nemo.collections.llm.gpt.data.utils import _reconfigure_limit_batches

        trainer = self._attached()
        trainer.limit_train_batches = _reconfigure_limit_batches(trainer.limit_train_batches, self._train)
        trainer.limit_val_batches = _reconfigure_limit_batches(trainer.limit_val_batches, self._validation)
        trainer.num_sanity_val_steps *= get_num_microbatches()

    def _attached(self) -> pl.Trainer:
        if self.trainer is None:
            raise RuntimeError("TextDataModule needs a trainer: pass it to `trainer.fit(model, data)`")
        return self.trainer
