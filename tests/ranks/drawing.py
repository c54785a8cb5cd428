"""Provide datasets whose items are draws from every random stream; workers that are spawned import only this."""

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

Draws = tuple[int, float, float, float]


def draw(index: int) -> Draws:
    return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class Drawing:
    """Each item is its index and a number from each stream."""

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Draws:
        return draw(index)


class DrawingLines(IterableDataset[Draws]):
    """Gives the same items from ``first`` on, dealt out to the workers batch by batch."""

    def __init__(self, first: int = 0, batch: int = 2, length: int = 12) -> None:
        self.first, self.batch, self.length = first, batch, length

    def __iter__(self) -> Iterator[Draws]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        for index in range(self.first, self.length):
            if (index - self.first) // self.batch % workers == worker:
                yield draw(index)


def draw_init(worker_id: int) -> None:
    """Stand in for a user's ``worker_init_fn``: every later batch shows what it drew."""
    global drawn_by_init
    drawn_by_init = draw(worker_id)


drawn_by_init: Draws = (-1, 0.0, 0.0, 0.0)


def collate(items: list[Draws]) -> list[Draws]:
    return [*items, draw(-1), drawn_by_init]
