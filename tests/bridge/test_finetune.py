"""Test ``finetune``, which begins with the weights of a checkpoint, through faults, on Bridge's own data for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.observability.report.verify import compare
from tests.bridge.recorded import without_streams
from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

SCRIPT = str(Path(__file__).parent / "scripts" / "train.py")
COUNTS_PASSES = not version("megatron-bridge").startswith("0.3.")
STEPS, SAMPLES = 9, 26  # three and a quarter global batches in each pass
Tune = Callable[..., Job]


@pytest.fixture(scope="module")
def tune(bridge_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Tune:
    """Return a function that makes a checkpoint once, and trains on from its weights with faults."""
    folder = tmp_path_factory.mktemp("tune")
    pretrained, samples = folder / "pretrained", written_samples(folder / "samples")

    def run(name: str, *args: str, faults: tuple[str, ...] = (), code: int = 0) -> Job:
        job = run_job(bridge_zygote, folder / name, 4, script=SCRIPT, args=args, faults=faults)
        assert job.code == code, job.story()
        assert fired(job.run_dir) == dict.fromkeys(faults, 1)
        return job

    run("pretraining", "4", f"save={pretrained}")

    def tuned(name: str, *more: str, steps: int = STEPS, **settings: Any) -> Job:
        return run(name, str(steps), f"tune={pretrained}", f"sft={samples}", "evaluate=3", *more, **settings)

    return tuned


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
    """Write a tokenizer of numbers, as Hugging Face's files have one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*map(str, range(124)), "<unk>", "<s>", "</s>", "<pad>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def undisturbed(tune: Tune) -> Job:
    return tune("undisturbed")


def equal(undisturbed: Job, job: Job) -> None:
    job.assert_same(undisturbed.steps, STEPS)


def test_it_begins_with_the_weights_and_counts_from_one(tune: Tune, undisturbed: Job) -> None:
    """Without the checkpoint, the same steps on the same samples have other losses."""
    fresh = tune("fresh", "tune=", steps=2)
    for rank, records in undisturbed.steps.items():
        assert [record.step for record in records] == list(range(1, STEPS + 1))
        assert all(one.loss != other.loss for one, other in zip(records[:2], fresh.steps[rank], strict=True))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_faults_in_several_passes(tune: Tune, undisturbed: Job, workers: int) -> None:
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
    job = tune(f"passes-{workers}", f"workers={workers}", faults=faults)
    assert len(job.incidents) == len(faults)
    equal(undisturbed, job)


@pytest.mark.long
def test_in_a_callback(tune: Tune, undisturbed: Job) -> None:
    job = tune("callback", "break=end:exception:2:4")
    assert len(job.incidents) == 1
    equal(undisturbed, job)


@pytest.mark.skipif(not COUNTS_PASSES, reason="Bridge 0.3 is told a number of steps")
def test_in_passes_that_take_every_sample(tune: Tune) -> None:
    """The last batch of a pass is filled up with samples that count nothing."""
    faults = ("sigkill@forward:rank=1,step=4", "exception@between:rank=2,step=4", "sigkill@backward:rank=3,step=7")
    undisturbed, job = tune("epochs", "epochs=2"), tune("epochs-faults", "epochs=2", faults=faults)
    job.assert_same(undisturbed.steps, 2 * -(-SAMPLES // 8))


def test_when_memory_has_lost_the_state_its_own_checkpoint_is_loaded(tune: Tune, tmp_path: Path) -> None:
    """Rank 2 dies before it can give what it and rank 0 held. What training began with is not asked for.

    Bridge saves the random streams of one data-parallel rank for all; batches that are as long on every rank keep
    them alike. Its sampler of whole batches begins every further pass where it was when the checkpoint was loaded;
    that of ``cyclic`` does not.
    """
    faults = ("sigkill@forward:rank=0,step=4", "sigkill@recovery:rank=2,step=3")
    undisturbed = tune("padded", "pad=1", "data=cyclic")
    job = tune("lost", "pad=1", "data=cyclic", f"save={tmp_path / 'saved'}", faults=faults)
    verdict = compare(without_streams(undisturbed.steps), without_streams(job.steps))
    assert verdict.difference is None, "what was done again has other bits"
    assert not verdict.missing
    assert {place.step for place in verdict.repeated} == {3}, "it went on from the checkpoint after step 2"


def test_without_a_checkpoint_of_its_own_the_job_ends_with_the_reason(tune: Tune) -> None:
    """The weights that training began with are not the state after the steps that were made."""
    faults = ("sigkill@forward:rank=0,step=4", "sigkill@recovery:rank=2,step=3")
    job = tune("ended", faults=faults, code=1)
    assert "no living rank holds the shard of ranks 0, 2" in "\n".join(job.said), job.said
    assert max(record.step for records in job.steps.values() for record in records) == 3
