"""A rank's whole state as plain bytes and tensors, and back; test_handover.py has all of its fields."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.replication.parts import Content
from checkpointless.replication.tiers.snapshot import RankLocal, Snapshot
from checkpointless.state.held_state import HeldState
from checkpointless.state.port import SnapshotPoint, StepSnapshot
from checkpointless.state.rank_local.state import RankLocalState
from checkpointless.state.rng import RngStates
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.digest import digest_value
from checkpointless.transfer.tensor_entry import Key

AT = 3, SnapshotPoint.COMMITTED


def state(own: RankLocal) -> Snapshot:
    tensors: dict[Key, torch.Tensor] = {
        ("model", 0, "weight"): torch.randn(7, 5).t(),
        ("optimizer", 0, 0, 1, "exp_avg"): torch.randn(9).to(torch.bfloat16),
        ("optimizer", 0, 0, 1, "step"): torch.tensor(3.0),
        ("model", 0, "empty"): torch.empty(0, 3),
    }
    objects: dict[Any, Any] = {
        "step": 3,
        ("a", 1): [True, None, {"large": torch.arange(2000.0)}],
        "optimizer": {"state": {("optimizer", 0, 0, 1): {"step": 3}}},
    }
    buffers: dict[Key, torch.Tensor] = {("model", 0, "mean"): torch.randn(3)}
    commit = CommitState(3, ready=False, torn=False)
    moments = {SnapshotPoint.COMMITTED: StepSnapshot(objects, buffers)}
    return Snapshot(HeldState(commit, tensors, moments, offset=5, buffers={AT: buffers}), own=own)


def test_it_comes_back_as_it_was() -> None:
    streams = [(step, RngStates.capture(float(step))) for step in (2, 3)]
    snapshot = state(RankLocal(streams, streams[0][1], [(*AT, b"record")]))
    found = Snapshot.of(snapshot.content())
    assert list(found.held.tensors) == list(snapshot.held.tensors)
    assert digest_value(found.held.tensors) == digest_value(snapshot.held.tensors)
    assert digest_value(found.held.buffers[AT]) == digest_value(snapshot.held.buffers[AT])
    assert (found.held.commit, found.held.offset) == (snapshot.held.commit, 5)
    moment, expected = found.held.moments[SnapshotPoint.COMMITTED], snapshot.held.moments[SnapshotPoint.COMMITTED]
    assert digest_value(moment.objects) == digest_value(expected.objects)
    assert found.own.records == [(*AT, b"record")]
    own = RankLocalState(0)
    found.own.put_back(own)
    assert own.streams.at(3)[SnapshotPoint.COMMITTED].loss == 3.0
    assert own.streams.newest(2) is not None
    assert own.streams.data_start() is not None
    assert own.buffers.record(*AT, None) == b"record"


@pytest.mark.parametrize(
    "content", [Content(state_tree.dumps({"format": 0}), ()), Content(state_tree.dumps([]), ())]
)
def test_anything_else_is_refused(content: Content) -> None:
    with pytest.raises(ValueError, match="state of a rank"):
        Snapshot.of(content)
