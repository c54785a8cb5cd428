"""The journal of a rank's steps: what it captures, in which order, and what it gives back."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from checkpointless.recovery import CheckpointManager
from checkpointless.state.journal import Captured, FrontEnd, StepBefore, StepJournal, _WeightWatch
from checkpointless.state.module_tensors import TrainingTensors
from checkpointless.state.port import MODEL, UPDATED_BUFFERS, SnapshotPoint

BUFFER = ("model", 0, "running_mean")


class State(TrainingTensors):
    """A weight, an optimizer, and a buffer that a step or an update writes to."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.norm = torch.nn.BatchNorm1d(1, affine=False)
        self.norm.weight = self.weight
        self.optimizer = torch.optim.SGD([self.weight], lr=0.5)
        self.writes = False  # to a buffer, in the update
        super().__init__([self.norm], [self.optimizer])

    def finish_update(self) -> None:
        self.optimizer.step()
        if self.writes:
            next(self.norm.buffers()).add_(1.0)


class Counting(FrontEnd):
    """Counts steps, as a trainer does: before the commit of a step its counter is that of the step before."""

    def __init__(self) -> None:
        self.count: Any = 0

    def ready(self, step: int) -> Captured:
        return Captured(lambda: {"outcome": step}, {"mine": step})

    def committed(self, step: int, ready: Captured, before: StepBefore | None) -> Callable[[], Any] | None:
        return (lambda: {**before[1](), **ready.objects()}) if before is not None else None

    def reached(self, step: int, point: SnapshotPoint) -> Captured:
        count = self.count
        return Captured(lambda: {"count": count})


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> CheckpointManager:
    monkeypatch.setattr(CheckpointManager, "replicate_rng_states", lambda *_: None)
    return CheckpointManager()


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def journal(state: State, manager: CheckpointManager) -> StepJournal:
    return StepJournal(state, manager, Counting())


def make_ready(journal: StepJournal, state: State) -> None:
    """Load, and compute the gradients of step 1."""
    journal.reached(0, SnapshotPoint.LOADED)
    state.weight.grad = torch.ones(2)
    journal.ready(1)


def test_a_rank_that_has_a_snapshot_also_has_its_streams(journal: StepJournal, manager: CheckpointManager) -> None:
    """A fault may interrupt the rank anywhere; a snapshot without streams cannot be resumed at."""
    with mock.patch.object(manager, "store_rng_states", side_effect=KeyError), pytest.raises(KeyError):
        journal.reached(4, SnapshotPoint.CHECKED)
    assert journal.snapshots(4) == {}
    journal.reached(4, SnapshotPoint.CHECKED)
    assert set(journal.snapshots(4)) == {SnapshotPoint.CHECKED}
    assert manager.own.streams.newest(4) is not None


def test_a_commit_leaves_the_rest_as_it_was_before(state: State, manager: CheckpointManager) -> None:
    front = Counting()
    journal = StepJournal(state, manager, front)
    make_ready(journal, state)
    assert journal.snapshots(0).keys() == {SnapshotPoint.LOADED}
    front.count = 1
    state.finish_update()
    journal.applied()
    assert journal.snapshots(0) == {}, "no rank goes back to before an update that is applied"
    (snapshot,) = journal.snapshots(1).values()
    assert (snapshot.objects["count"], snapshot.objects["outcome"]) == (0, 1)
    journal.reached(1, SnapshotPoint.CHECKED)
    found = journal.snapshots(1)
    assert [each.objects["count"] for each in found.values()] == [0, 1]
    assert manager.own.kept_at(1, SnapshotPoint.COMMITTED) == {"mine": 1}


def test_what_was_taken_is_put_back(journal: StepJournal, state: State, manager: CheckpointManager) -> None:
    state.norm.eval()
    state.optimizer.param_groups[0]["lr"] = 0.25
    journal.reached(2, SnapshotPoint.CHECKED)
    other, objects = State(), journal.objects()
    fresh = StepJournal(other, manager, Counting())
    fresh.restore(2, SnapshotPoint.CHECKED, objects)
    assert (other.norm.training, other.optimizer.param_groups[0]["lr"]) == (False, 0.25)
    other.norm.train()
    next(other.norm.buffers()).fill_(9.0)
    fresh.put_back()
    assert (other.norm.training, next(other.norm.buffers()).item()) == (False, 0)
    assert objects[MODEL]["groups"][0][0]["lr"] == 0.25


def test_an_update_is_finished_later_with_the_rates_that_it_was_to_have(journal: StepJournal, state: State) -> None:
    make_ready(journal, state)
    assert journal.buffers(1).keys() == {SnapshotPoint.COMMITTED}
    assert journal.snapshots(1)[SnapshotPoint.COMMITTED].objects["outcome"] == 1, "what it will leave is known"
    state.optimizer.param_groups[0]["lr"] = 7.0  # by a scheduler of the next entry
    journal.finish_update()
    assert state.weight.tolist() == [0.5, 0.5]
    assert journal.newest == (1, SnapshotPoint.COMMITTED)


def test_gradients_that_overflow_are_not_applied_later_either(journal: StepJournal, state: State) -> None:
    with mock.patch.object(Counting, "ready", return_value=Captured(is_skipped=True)):
        make_ready(journal, state)
    journal.finish_update()
    assert state.weight.tolist() == [1.0, 1.0]
    assert journal.newest == (1, SnapshotPoint.COMMITTED)


def test_buffers_that_an_update_writes_to_are_those_after_it(journal: StepJournal, state: State) -> None:
    state.writes = True
    make_ready(journal, state)
    assert journal.buffers(1)[SnapshotPoint.COMMITTED][BUFFER].item() == 0
    state.finish_update()
    journal.applied()
    snapshot = journal.snapshots(1)[SnapshotPoint.COMMITTED]
    assert snapshot.buffers[BUFFER].item() == 1
    assert snapshot.objects[UPDATED_BUFFERS] == [BUFFER]


def test_a_point_whose_weights_are_others_now_is_not_resumed_at(journal: StepJournal, state: State) -> None:
    """A validation with other weights, after whose exchange the trainer has reached a point."""
    journal.reached(3, SnapshotPoint.COMMITTED)
    with torch.no_grad():
        state.weight.mul_(2.0)
    assert "parameters were changed beside the update since step 3 (committed)" in journal.changed()
    journal.reached(3, SnapshotPoint.ENDED)
    assert journal.changed() == ""
    assert journal.snapshots(3).keys() == {SnapshotPoint.ENDED}


# --- That other weights than those of a step boundary are noticed, whichever way they were written ----------------


def put_back(weight: torch.nn.Parameter) -> None:
    """Put the same bytes in another place."""
    weight.data = weight.data.clone()


@pytest.mark.parametrize(
    ("change", "is_other"),
    [
        (lambda weight: weight.data.add_(1e-3), True),
        (lambda weight: weight.data.zero_(), True),
        (put_back, False),
        (lambda weight: None, False),
        (lambda weight: weight.sum().backward(), False),
    ],
    ids=["moved", "zeroed", "put-back", "nothing", "backward"],
)
def test_weights_that_were_exchanged_are_noticed(change: Callable[[Any], object], is_other: bool) -> None:
    weights = [weight for _ in range(20) for weight in torch.nn.Linear(9, 9).parameters()]
    watch = _WeightWatch(lambda: weights)
    before = watch.see()
    for weight in weights:
        change(weight)
    assert watch.is_other(before) is is_other
    assert not watch.is_written(before), "what is written through the data is not counted"
