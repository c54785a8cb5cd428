"""Test ``finetune``, which begins with the weights of a checkpoint, through faults, on Bridge's own data for it."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.bridge.test_saves import require_same_from_the_checkpoint
from tests.ranks.jobs import Attempt, Trainings

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

SCRIPT = str(Path(__file__).parent / "scripts" / "train.py")
COUNTS_PASSES = not version("megatron-bridge").startswith("0.3.")
STEPS, SAMPLES = 9, 26  # three and a quarter global batches in each pass
LOST = ("sigkill@forward:rank=0,step=4", "sigkill@recovery:rank=2,step=3")


@pytest.fixture(scope="module")
def tune(trainings: Trainings, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    pretrained = trainings.calm(4, "4", "save=saved").run_dir / "saved"
    samples = written_samples(tmp_path_factory.mktemp("tune") / "samples")
    return str(STEPS), f"tune={pretrained}", f"sft={samples}", "evaluate=3"


def written_samples(folder: Path) -> Path:
    """Write samples of different lengths as Bridge's data for finetuning has them: a prompt and an answer."""
    folder.mkdir()
    for name, count in (("training", SAMPLES), ("validation", 8)):
        lines = []
        for index in range(count):
            words = [str(each * 7 % 120) for each in range(index, index + 9 + index % 11)]
            lines.append(json.dumps({"input": " ".join(words[:5]), "output": " ".join(words[5:])}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    write_tokenizer(folder / "tokenizer")
    return folder


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*map(str, range(124)), "<unk>", "<s>", "</s>", "<pad>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)


def test_it_begins_with_the_weights_and_counts_from_one(trainings: Trainings, tune: tuple[str, ...]) -> None:
    """Without the checkpoint, the same steps on the same samples have other losses."""
    fresh = trainings.run(4, (*tune, "tune="))
    for rank, records in trainings.calm(4, *tune).steps.items():
        assert [record.step for record in records] == list(range(1, STEPS + 1))
        assert all(one.loss != other.loss for one, other in zip(records[:2], fresh.steps[rank]))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_faults_in_several_passes(trainings: Trainings, tune: tuple[str, ...], workers: int) -> None:
    """Before the first step the weights are loaded again."""
    faults = (
        "sigkill@forward:rank=2,step=1",
        "sigkill@forward:rank=1,step=2",
        "exception@backward:rank=0,step=3",
        "exception@between:rank=2,step=4",
        "sigkill@optimizer:rank=3,step=5",
        "exception@after_optimizer:rank=1,step=6",
        "sigkill@data:rank=0,step=8",
    )
    job = trainings.rough(4, tune, *faults, steps=STEPS, more=(f"workers={workers}",))
    assert len(job.incidents) == len(faults)


@pytest.mark.long
def test_in_a_callback(trainings: Trainings, tune: tuple[str, ...]) -> None:
    job = trainings.rough(4, tune, steps=STEPS, more=("break=end:exception:2:4",))
    assert len(job.incidents) == 1


@pytest.mark.skipif(not COUNTS_PASSES, reason="Bridge 0.3 is told a number of steps")
def test_in_passes_that_take_every_sample(trainings: Trainings, tune: tuple[str, ...]) -> None:
    """The last batch of a pass is filled up with samples that count nothing."""
    faults = ("sigkill@forward:rank=1,step=4", "exception@between:rank=2,step=4", "sigkill@backward:rank=3,step=7")
    trainings.rough(4, (*tune, "epochs=2"), *faults, steps=2 * -(-SAMPLES // 8))


def test_after_a_loss_its_own_checkpoint_is_loaded(trainings: Trainings, tune: tuple[str, ...]) -> None:
    """Rank 2 dies before it can give what it and rank 0 held. What training began with is not asked for.

    Bridge saves the random streams of one data-parallel rank for all; batches that are as long on every rank keep
    them alike. Its sampler of whole batches begins every further pass where it was when the checkpoint was loaded;
    that of ``cyclic`` does not.
    """
    args = (*tune, "pad=1", "data=cyclic")
    require_same_from_the_checkpoint(trainings.calm(4, *args), trainings.run(4, (*args, "save=saved"), *LOST))


def test_without_a_checkpoint_of_its_own_the_job_ends(attempt: Attempt, tune: tuple[str, ...]) -> None:
    """The weights that training began with are not the state after the steps that were made."""
    job = attempt(4, args=tune, faults=LOST, code=1)
    assert "no living rank holds the shard of ranks 0, 2" in "\n".join(job.said), job.said
    assert max(record.step for records in job.steps.values() for record in records) == 3
