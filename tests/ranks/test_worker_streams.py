"""Test that random numbers drawn in data-loader workers are, after a recovery, those of an undisturbed run."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from checkpointless.recovery import Place, seed_data_workers
from tests.ranks.drawing import Drawing, DrawingLines, collate, draw_init
from tests.ranks.jobs import Disturb
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 5
NOISY = ("data._target_=tests.ranks.noisy_text.NoisyTextDataModule", "data.num_workers=2")
NOISY_TRAINING = ("callbacks.noise={_target_: tests.ranks.noisy_text.NoisyEmbedding}",)
VALIDATION = ("trainer.limit_val_batches=2", "trainer.val_check_interval=2")


@pytest.mark.nemo
def test_what_iterators_draw_does_not_move_the_training_streams(disturb: Disturb) -> None:
    """Each iterator takes its workers' seed from the training's stream, one more after a fault."""
    faults = ("sigkill@between:rank=1,step=2", "exception@forward:rank=0,step=4")
    disturb(2, STEPS, *faults, args=(*NOISY, *NOISY_TRAINING, *VALIDATION))


@pytest.mark.long
@pytest.mark.nemo
def test_the_seed_is_that_of_the_first_start(disturb: Disturb) -> None:
    args = ("data._target_=tests.ranks.noisy_text.ReseedingDataModule", "data.num_workers=2")
    disturb(2, STEPS, "exception@backward:rank=0,step=2", "sigkill@backward:rank=0,step=4", args=args)


@pytest.mark.nemo
def test_all_ranks_agree_on_a_seed_that_any_of_them_kept(nemo_zygote: Zygote) -> None:
    agree = "tests.ranks.worker_stream_ranks:agree"
    assert nemo_zygote.run(2, agree, {"keeps": [None, None]}) == [100, 100]
    assert nemo_zygote.run(2, agree, {"keeps": [None, 2**63 + 5]}) == [2**63 + 5, 2**63 + 5]


@pytest.mark.nemo
def test_what_the_strategy_makes_of_a_loader(nemo_zygote: Zygote) -> None:
    answers = nemo_zygote.run(2, "tests.ranks.worker_stream_ranks:loaders_of_a_trainer")
    for rank, answer in enumerate(answers):
        assert answer["training"] == [7, rank, "training", 2, 12]
        assert answer["evaluation"] == [7, rank, "evaluation", None, 0]  # of the sampler's epoch
        assert answer["again"] == [2, 0]
        iterable, unknown = answer["said"]
        assert "Lines is iterable" in iterable
        assert "tuple_iterator" in unknown


# --- torch's own loader and workers, without a job ----------------------------------------------------------------

START = Place()


def loader(dataset: Any, place: Place = START, seed: int = 1, rank: int = 0, **settings: Any) -> DataLoader[Any]:
    settings = {"num_workers": 2, "batch_size": 2, "collate_fn": list, **settings}
    made: DataLoader[Any] = DataLoader(dataset, **settings)
    seed_data_workers(made, seed, rank=rank, place=lambda: place)
    return made


def test_a_batch_depends_on_seed_rank_epoch_and_its_indices_alone() -> None:
    batches = list(loader(Drawing()))
    numbers = [number for batch in batches for _, *rest in batch for number in rest]
    assert len(set(numbers)) == len(numbers), "no two draws are equal"
    assert list(loader(Drawing(), num_workers=3)) == batches
    resumed = loader(Drawing(), batch_size=1, sampler=None, batch_sampler=[[6, 7], [8, 9]])
    assert list(resumed) == batches[3:5]
    for other in (loader(Drawing(), seed=2), loader(Drawing(), rank=1), loader(Drawing(), Place(epoch=1))):
        assert not {number for batch in other for _, *rest in batch for number in rest} & set(numbers)


def test_persistent_workers_begin_a_new_epoch_with_every_pass() -> None:
    persistent = loader(Drawing(), persistent_workers=True)
    first, second = list(persistent), list(persistent)
    assert first == list(loader(Drawing()))
    assert second == list(loader(Drawing(), Place(epoch=1)))
    assert second != first


def test_collating_and_the_users_init_draw_from_the_same_streams() -> None:
    before = torch.get_rng_state()
    settings: dict[str, Any] = {"collate_fn": collate, "worker_init_fn": draw_init}
    once = list(loader(Drawing(), **settings))
    assert {batch[-1][0] for batch in once} == {0, 1}
    assert list(loader(Drawing(), **settings)) == once
    assert not torch.equal(torch.get_rng_state(), before), "torch drew a base seed, and it made no difference"


def test_single_samples_are_known_by_their_index() -> None:
    plain: dict[str, Any] = {"batch_size": None, "collate_fn": None}
    samples = list(loader(Drawing(), **plain))
    assert list(loader(Drawing(), sampler=range(5, 12), **plain)) == samples[5:]


@pytest.mark.long
def test_spawned_workers_draw_the_same() -> None:
    assert list(loader(Drawing(4), multiprocessing_context="spawn")) == list(loader(Drawing(4)))


def test_batches_of_an_iterable_dataset_are_counted() -> None:
    batches = list(loader(DrawingLines()))
    assert [index for batch in batches for index, *_ in batch] == list(range(12))
    assert list(loader(DrawingLines(first=6), Place(batch=3))) == batches[3:]
    assert list(loader(DrawingLines(first=6), Place(batch=0))) != batches[3:]
