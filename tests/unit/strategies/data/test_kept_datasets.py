"""Test which datasets a data module gets back after a fault, and which it builds anew, and why."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from checkpointless.strategies.data import kept_datasets
from checkpointless.strategies.data.kept_datasets import keep_datasets, leads_to

ANOTHER = "another rank sets its data module up"


class Numbers(Dataset[int]):
    """A map-style dataset of plain values.

    Args:
        items: the values.
        **more: what else it has.
    """

    def __init__(self, items: list[Any], **more: object) -> None:
        self.items = items
        vars(self).update(more)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> int:
        return int(self.items[index])


class Stream(IterableDataset[int]):
    """A dataset that is read from its beginning."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


Change = Callable[[Any], object]


class Module(pl.LightningDataModule):
    """A data module that draws a number while it builds.

    Args:
        more: what it does beside that.
    """

    def __init__(self, more: Change = lambda module: None) -> None:
        super().__init__()
        self.size, self.built, self._more = 4, 0, more
        self.notes: list[int] = []

    def setup(self, stage: str) -> None:
        """Build the dataset."""
        self.built += 1
        self.train = Numbers([random.random() for _ in range(self.size)])
        self._more(self)


class Block:
    """A block that is entered again and again.

    Attributes:
        generation: the number of the entry, as the wrapper has it.
        everyone: whether the other ranks have theirs.
        told: what the events said.
        fault: what comes before the ranks have agreed.
    """

    def __init__(self) -> None:
        self.generation = -1
        self.everyone = True
        self.told: list[Mapping[str, Any]] = []
        self.fault: BaseException | None = None

    def vote(self, mine: bool) -> bool:
        """Stand in for the reduction over all ranks."""
        if self.fault is not None:
            raise self.fault
        return mine and self.everyone

    def enter(self, more: Change = lambda module: None, before: Change = lambda module: None, **sizes: int) -> Any:
        """Enter the block, set a new data module up, and return it."""
        self.generation += 1
        random.seed(7)
        module = Module(more)
        loop = SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=SimpleNamespace()))
        trainer: Any = SimpleNamespace(
            datamodule=module, max_steps=3, lightning_module=pl.LightningModule(), fit_loop=loop, callbacks=[]
        )
        vars(trainer).update(sizes)
        module.trainer = trainer
        call: Any = self
        keep_datasets(trainer, call)
        before(module)
        module.setup("fit")
        return module

    @property
    def reason(self) -> str:
        """The reason that the last event gave."""
        return str(self.told[-1]["reason"])


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Block:
    made = Block()
    monkeypatch.setattr(kept_datasets, "true_on_all", made.vote)
    monkeypatch.setattr(kept_datasets, "tell", lambda name, **fields: made.told.append(fields))
    return made


def test_what_was_built_comes_back_as_often_as_a_fault_does(block: Block) -> None:
    first = block.enter()
    after = random.random()
    for _ in range(3):
        again = block.enter()
        assert again.train is first.train
        assert again.built == 1
        assert random.random() == after, "the streams are where building leaves them"
    assert [each["kept"] for each in block.told] == [True] * 3


_old: list[weakref.ref[Any]] = []
_alive: list[bool] = []


def look_for_old_ones(module: Any) -> None:
    """Note which datasets of earlier calls are alive: in globals, which are not among what ``setup`` finds."""
    _alive.extend(each() is not None for each in _old)
    _old.append(weakref.ref(module.train))


def test_an_old_dataset_is_gone_when_another_one_is_built(block: Block) -> None:
    block.everyone = False
    block.enter(look_for_old_ones)
    gc.collect()  # the old trainer and its data module know each other
    assert _old[0]() is not None
    block.enter(look_for_old_ones)
    assert _alive == [False]
    assert block.told == [{"kept": False, "reason": ANOTHER}]


def test_a_fault_before_all_have_agreed_loses_nothing(block: Block) -> None:
    first = block.enter()
    block.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        block.enter()
    block.fault = None
    assert block.enter().train is first.train


def test_a_fault_while_a_data_module_is_set_up_leaves_nothing(block: Block) -> None:
    def fail(module: Any) -> None:
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError):
        block.enter(fail)
    block.enter()
    assert block.reason == "a fault came while its data module was set up"
    assert block.enter().built == 1
    assert block.told[-1]["kept"]


def test_a_rank_that_is_new_has_nothing(block: Block) -> None:
    block.generation = 4
    block.enter()
    assert block.reason == "its process is new, or the fault came before its data module was set up"


# --- what setup finds has to be the same --------------------------------------------------------------------------


def grow(module: Any) -> None:
    module.size = 5


def draw(module: Any) -> None:
    torch.rand(1)


def test_another_attribute(block: Block) -> None:
    block.enter()
    assert len(block.enter(before=grow).train) == 5
    assert block.reason == "size is another one"


def test_another_size_of_the_trainer(block: Block) -> None:
    block.enter()
    block.enter(max_steps=9)
    assert block.reason == "max_steps is another one"


@pytest.mark.parametrize("stream", [draw, lambda module: random.random()], ids=["torch", "python"])
def test_other_random_numbers(block: Block, stream: Change) -> None:
    block.enter()
    block.enter(before=stream)
    assert block.reason == "random numbers were drawn otherwise before"


# --- what setup builds has to last, and to lead nowhere -----------------------------------------------------------


def put(name: str, value: Callable[[Any], object]) -> Change:
    """Return what sets an attribute that is made of the data module."""
    return lambda module: setattr(module, name, value(module))


PASSING: dict[str, tuple[Change, str]] = {
    "a stream": (put("more", lambda _: Stream()), "more of the data module has a Stream"),
    "a stream in a list": (put("more", lambda _: [[1, Stream()]]), "more of the data module has a Stream"),
    "a stream in a dict": (put("more", lambda _: {"a": (Stream(),)}), "more of the data module has a Stream"),
    "a loader": (put("more", lambda module: DataLoader(module.train)), "more of the data module has a DataLoader"),
    "in place": (lambda module: module.notes.append(3), "setup changes notes of the data module in place"),
    "told to the model": (
        lambda module: setattr(module.trainer.lightning_module, "classes", module.size),
        "setup changes the LightningModule.classes",
    ),
    "to the trainer": (
        put("more", lambda module: Numbers([], trainer=module.trainer)),
        "what setup built leads to the SimpleNamespace",
    ),
    "to the data module": (
        put("more", lambda module: Numbers([], owner=[{"module": module}])),
        "what setup built leads to the Module",
    ),
    "to the model": (
        put("more", lambda module: Numbers([], model=module.trainer.lightning_module)),
        "what setup built leads to the LightningModule",
    ),
    "in a closure": (
        put("more", lambda module: Numbers([], transform=lambda item: item + module.size)),
        "what setup built leads to the Module",
    ),
    "as a default": (
        put("more", lambda module: Numbers([], transform=lambda item, of=module: item + of.size)),
        "what setup built leads to the Module",
    ),
    "a method": (
        put("more", lambda module: Numbers([], transform=module.train_dataloader)),
        "what setup built leads to the Module",
    ),
}


@pytest.mark.parametrize("passing", PASSING)
def test_what_ends_with_a_generation_is_built_anew(block: Block, passing: str) -> None:
    change, reason = PASSING[passing]
    first = block.enter(change)
    again = block.enter(change)
    assert again.train is not first.train
    assert block.reason.startswith(reason)


LASTING: dict[str, Change] = {
    "plain values": put("more", lambda _: {"a": [1, (2.0, "3", b"4", None, True)]}),
    "datasets": put("more", lambda module: [module.train, {"b": Numbers([])}]),
    "what contains itself": put("more", lambda _: _ring()),
    "an attribute that is replaced": put("size", lambda _: 9),
    "a function": put("more", lambda _: Numbers([], transform=lambda item: item + 1)),
}


def _ring() -> list[Any]:
    ring: list[Any] = []
    ring.append([ring])
    return ring


@pytest.mark.parametrize("lasting", LASTING)
def test_what_lasts_is_not_built_again(block: Block, lasting: str) -> None:
    first = block.enter(LASTING[lasting])
    again = block.enter(LASTING[lasting])
    assert again.train is first.train
    assert again.size == first.size


def test_a_large_dataset_of_objects_comes_back_and_a_larger_one_says_why_not(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = put("more", lambda _: Numbers([[each] for each in range(310_000)]))
    first = block.enter(many)
    assert block.enter(many).more is first.more
    monkeypatch.setattr(kept_datasets, "_MOST_OBJECTS", 100_000)
    block.everyone = False
    block.enter(many)
    block.enter(many)
    assert block.reason == "what setup built has more than 100,000 objects"


def test_plain_values_do_not_count() -> None:
    plain = [(each, str(each)) for each in range(1_000)]
    target = SimpleNamespace()
    assert leads_to(plain, [target]) is None
    assert leads_to([plain, [(1, [target])]], [target]) == "what setup built leads to the SimpleNamespace"
