"""The text of Python's help topics, so that nothing is downloaded, and a dataset of it."""

import functools
from pydoc_data import topics as pydoc_topics

import torch
from torch.utils.data import Dataset


@functools.cache
def english() -> bytes:
    """Return the text of Python's own help topics, in the order of their names."""
    topics: dict[str, str] = pydoc_topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class TextWindows(Dataset):
    """Dataset of back-to-back windows of `text`, shuffled again for each pass; an item depends on nothing else."""

    def __init__(self, text: bytes, seq_length: int, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self._seq_length = seq_length
        self._seed = seed
        self._windows = (len(text) - 1) // seq_length
        if self._windows < 1:
            raise ValueError(f"a text of {len(text)} bytes has no window of {seq_length} + 1 tokens")
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._loss_mask = torch.ones(seq_length, dtype=torch.float32)
        self._position_ids = torch.arange(seq_length, dtype=torch.int64)
        # True means masked. Megatron's own layers need a mask; only TransformerEngine makes one itself.
        self._attention_mask = torch.ones(1, seq_length, seq_length, dtype=torch.bool).triu(1)
        self._pass_number = -1

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return `tokens`, `labels`, `position_ids` (int64), `loss_mask` (float32) of shape (seq_length,), and
        `attention_mask` (bool, True where masked) of shape (1, seq_length, seq_length).
        """
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        pass_number, place = divmod(index, self._windows)
        if pass_number != self._pass_number:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + pass_number)
            self._order = torch.randperm(self._windows, generator=generator)
            self._pass_number = pass_number
        start = int(self._order[place]) * self._seq_length
        window = self._text[start : start + self._seq_length + 1].long()
        return {
            "tokens": window[:-1],
            "labels": window[1:],
            "loss_mask": self._loss_mask,
            "position_ids": self._position_ids,
            "attention_mask": self._attention_mask,
        }
