"""Test that ``keep`` gives ranks that live through a fault what they have built, where that is the same."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.report.verify import Steps, compare
from checkpointless.telemetry.event_names import EventName
from checkpointless.telemetry.events import read_events
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

STEPS = 8
#: Words that change nothing in a run without faults.
SAME_STEPS = {"anew", "counts", "collects", "refers", "overwrites", "quietly", "accumulates", "broadcasts", "loads"}
Calm = Callable[[str, int], Steps]
Train = Callable[..., Job]


@pytest.fixture(scope="module")
def calm(nemo_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Return a function for the steps without faults of some words; it trains once for those that change them."""

    @functools.cache
    def steps(words: frozenset[str], ranks: int) -> Steps:
        args = (str(STEPS), *sorted(words))
        folder = tmp_path_factory.mktemp("calm") / "run"
        job = run_job(nemo_zygote, folder, ranks, script=str(SCRIPTS / "plain_kept.py"), args=args)
        assert job.code == 0, job.story()
        return job.steps

    return lambda words, ranks: steps(frozenset(words.split()) - SAME_STEPS, ranks)


@pytest.fixture
def train(nemo_zygote: Zygote, calm: Calm, tmp_path: Path) -> Train:
    """Return a function that trains with faults and some words, and requires that nothing differs."""

    def run(words: str, *faults: str, ranks: int = 4) -> Job:
        script, args = str(SCRIPTS / "plain_kept.py"), (str(STEPS), *words.split())
        job = run_job(nemo_zygote, tmp_path / "run", ranks, script=script, args=args, faults=faults)
        assert job.code == 0, job.story()
        assert fired(job.run_dir) == dict.fromkeys(faults, 1)
        verdict = compare(calm(words, ranks), job.steps)
        assert verdict.equal, f"{verdict.sentence}\n{job.story()}"
        assert verdict.steps == STEPS
        return job

    return run


def told(job: Job) -> list[Mapping[str, Any]]:
    """Return what the ranks told of their models, in the order of the events."""
    return [event.fields for event in read_events(job.run_dir) if event.stage == EventName.WARM]


def memory(job: Job, rank: int) -> list[tuple[int, int, int]]:
    """Return, for each entry of a rank: how often it has built, its bytes before the restore, and in a step."""
    found = re.findall(r"built (\d+) times, (\d+) bytes before, (\d+) bytes in a step", job.log(rank))
    return [(int(built), int(before), int(within)) for built, before, within in found]


def test_a_survivor_builds_once_and_has_no_second_copy(train: Train) -> None:
    faults = ("exception@backward:rank=2,step=3", "sigkill@forward:rank=1,step=6")
    job = train("", *faults)
    assert [each["kept"] for each in told(job)] == [True] * 7
    entries = memory(job, 0)
    assert [built for built, _, _ in entries] == [1, 1, 1]
    within = entries[0][2]
    assert all(before < 1.05 * within for _, before, _ in entries), entries


@pytest.mark.parametrize("word", ["broadcasts", "loads"])
def test_first_weights_that_come_behind_keep_are_not_written_over_the_trained_ones(train: Train, word: str) -> None:
    """Rank 0, whose weights or checkpoint the others would have, is a new process in the second entry."""
    job = train(word, "sigkill@backward:rank=0,step=5", "exception@forward:rank=1,step=7")
    assert [each["kept"] for each in told(job) if each.get("reason", "").endswith("first step")] == [False] * (
        word == "loads"
    )
    assert sum(each["kept"] for each in told(job)) == (6 if word == "loads" else 7), told(job)


def test_it_can_be_switched_off(train: Train) -> None:
    job = train("anew", "exception@backward:rank=2,step=3")
    assert told(job) == []
    (_, (built, before, within)) = memory(job, 0)
    assert built == 2
    assert before > 1.2 * within, "this would be noticed"


@pytest.mark.parametrize("words", ["two", "freezes", "two freezes"])
def test_updates_that_are_made_again(train: Train, words: str) -> None:
    """The first to die has applied the update, or all others have; each time the others still have gradients."""
    faults = (
        "sigkill@optimizer:rank=1,step=2",
        "exception@after_optimizer:rank=0,step=3",
        "sigkill@after_optimizer:rank=2,step=4",
        "sigkill@optimizer:rank=0,step=6",
    )
    job = train(words, *faults)
    assert all(each["kept"] for each in told(job)), told(job)
    assert len(told(job)) == 13 * (2 if "two" in words else 1)


def test_faults_before_what_is_kept_is_restored(train: Train) -> None:
    """The next entry builds anew; the one after that keeps what was built then."""
    faults = (
        "sigkill@optimizer:rank=3,step=3",
        "exception@init:rank=1,step=3",
        "exception@recovery:rank=2,step=3",
        "exception@backward:rank=0,step=6",
    )
    job = train("", *faults)
    kept = [each for each in told(job) if each["kept"]]
    anew = [each["reason"] for each in told(job) if not each["kept"]]
    assert anew == ["another fault came before what was kept was restored"] * 3
    assert len(kept) == 3 + 4


@pytest.mark.parametrize("source", [0, 1])
def test_the_first_synchronisation_of_ddp_with_ranks_that_keep_their_parameters(
    nemo_zygote: Zygote, source: int
) -> None:
    """Tensors of two types fill several buckets."""
    kept = nemo_zygote.run(3, "tests.ranks.kept_ranks:sync", {"source": source})
    whole, empty = [True] * 8, 3  # a tensor without elements is as it was in any case
    assert kept[source] == whole
    others = [rank for rank in range(3) if rank != source]
    for rank in others:
        changed = [at for at, is_kept in enumerate(kept[rank]) if not is_kept]
        expected = [2, 7] if rank == 1 else [at for at in range(8) if at != empty]
        assert changed == expected, f"rank {rank}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("counts", "Model 0 is not as it was built (attributes: calls)"),
        ("collects", "Model 0 is not as it was built (attributes: seen)"),
        ("hook", "Dropout drop is not as it was built (hooks: _forward_hooks)"),
        ("writes", "first.bias is written to between keep() and the first step"),
        ("writes quietly", "first.bias is written to between keep() and the first step"),
        ("wraps", "build wraps a module in DistributedDataParallel, which refers to process groups"),
        ("varies", "argument 0 of build is not what it was before"),
        ("locked", "argument 0 of build holds a lock, of which it is not known what it keeps"),
        ("refers", "a DistributedDataParallel of the modules is still referred to"),
        ("accumulates", "the accumulation of a gradient is still referred to, where hooks may hang"),
    ],
)
def test_what_is_not_sure_to_be_the_same_is_built_anew(train: Train, words: str, reason: str) -> None:
    job = train(words, "exception@backward:rank=0,step=3", "sigkill@optimizer:rank=1,step=5", ranks=2)
    assert [each["reason"] for each in told(job) if not each["kept"]] == [reason] * 3, told(job)


@pytest.mark.parametrize("words", ["overwrites", "overwrites quietly"])
def test_a_rank_whose_only_copy_is_overwritten_is_filled(train: Train, words: str) -> None:
    job = train(words, "exception@backward:rank=2,step=3")
    assert [each["kept"] for each in told(job)] == [True] * 4
    assert "first.bias was written to between keep() and the first step" in job.log(1)
    (incident,) = job.incidents
    assert incident.sources == (0, 2, 3)


def test_a_start_from_scratch_does_not_begin_with_what_was_trained(nemo_zygote: Zygote, tmp_path: Path) -> None:
    script, args = str(SCRIPTS / "plain_kept.py"), (str(STEPS), "scratch", "overwrites")
    calm = run_job(nemo_zygote, tmp_path / "calm", 4, script=script, args=args)
    job = run_job(
        nemo_zygote, tmp_path / "run", 4, script=script, args=args, faults=("sigkill@forward:rank=0,step=3",)
    )
    assert job.code == 0, job.story()
    assert [each["kept"] for each in told(job)] == [True] * 3 + [False] * 3, told(job)
    assert sum(record.step == 1 for record in job.steps[3]) == 2, "it has started over"
    again = {record.step: record.loss for record in job.steps[3]}
    assert again == {record.step: record.loss for record in calm.steps[3]}


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("communicates", "keep(build): build communicates"),
        ("scheduler", "keep(build): build has to return a module, an optimizer, or a tuple, list or dict of these"),
    ],
)
def test_what_cannot_be_kept_at_all_is_refused_before_the_first_step(
    nemo_zygote: Zygote, tmp_path: Path, word: str, reason: str
) -> None:
    job = run_job(nemo_zygote, tmp_path / "run", 4, script=str(SCRIPTS / "plain_kept.py"), args=("3", word))
    assert job.code == 1
    assert reason in job.said[-1], job.story()
