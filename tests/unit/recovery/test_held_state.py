"""What a rank holds between two generations is that of one moment, and an update that failed belongs to none."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.recovery import PEFTCheckpointManager
from checkpointless.replication.host_memory import HostMemoryPool
from checkpointless.state import held_state
from checkpointless.state.held_state import HeldState
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.serialization.digest import MemoryChecksumManager
from checkpointless.transfer.tensor_entry import Key
from tests.unit.recovery.made_up_state import WEIGHT, MadeUpJournal, MadeUpState


def at_3(ready: bool = False, torn: bool = False) -> CommitState:
    return CommitState(3, ready=ready, torn=torn)


def hold(live: MadeUpState | None = None, checksum: bool = False, **commit: bool) -> HeldState:
    journal = MadeUpJournal(MadeUpState(step=3) if live is None else live)
    return HeldState.of(journal, at_3(**commit), MemoryChecksumManager(checksum), fit=2, offset=7)


@pytest.mark.parametrize("torn", [True, False])
def test_moments_and_digest_are_those_of_a_whole_state(torn: bool) -> None:
    live = MadeUpState(step=3)
    held = hold(live, checksum=True, torn=torn)
    assert (held.digests is None) is torn
    assert list(held.moments) == ([] if torn else [SnapshotPoint.COMMITTED, SnapshotPoint.CHECKED])
    assert set(held.buffers) == {(3, SnapshotPoint.COMMITTED), (4, SnapshotPoint.COMMITTED)}
    assert all(held.tensors[key].data_ptr() == tensor.data_ptr() for key, tensor in live.tensors().items())
    assert (held.journal, held.fit, held.offset) == (None, 2, 7)


@pytest.mark.parametrize("trained", [set(), {"buffer"}], ids=["all is trained", "a weight is frozen"])
def test_frozen_weights_are_compared_between_replicas(trained: set[str]) -> None:
    manager = PEFTCheckpointManager(enable_checksum=True)
    manager.params_to_save = trained
    digests = []
    for value in (1.0, 2.0):
        live = MadeUpState(step=3)
        live.present[WEIGHT] = torch.full((1,), value)
        held = HeldState.of(MadeUpJournal(live), at_3(), manager.checksum_manager, 1, 0, manager._is_frozen)
        digests.append(held.digests)
    assert (digests[0] != digests[1]) is bool(trained)


@pytest.mark.slow
@pytest.mark.parametrize("redone", [True, False])
def test_no_gradient_is_held(redone: bool) -> None:
    live = MadeUpState(step=3)
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    live.present["model", 0, "trained"] = parameter
    gradient = weakref.ref(parameter.grad)
    held = hold(live, ready=redone)
    if redone:
        held.redo(4)
        held.let_trainer_go()
    del live, parameter
    gc.collect()
    assert gradient() is None
    assert held.tensors["model", 0, "trained"].tolist() == [1, 1]


def test_going_back_gives_the_buffers_and_objects_of_that_moment_and_drops_the_others() -> None:
    held = hold()
    assert held.go_back_to(SnapshotPoint.COMMITTED) == {"step": 3, "stage": 0}
    assert list(held.moments) == [SnapshotPoint.COMMITTED]
    assert held.tensors["model", 0, "buffer"].tolist() == [30.0]
    assert ("model", 0, "gone") not in held.tensors


def test_a_step_is_redone_once_from_the_gradients_that_are_held() -> None:
    live = MadeUpState(step=3)
    held = hold(live, checksum=True, ready=True)
    for _ in range(2):
        held.redo(4)
    assert live.applied == 1
    assert (held.commit, held.digests) == (CommitState(4, ready=False, torn=False), None)
    assert held.go_back_to(SnapshotPoint.COMMITTED)["step"] == 4


def test_a_step_cannot_be_redone_without_gradients() -> None:
    held = hold(ready=True)
    held.let_trainer_go()
    assert held.commit == at_3()
    with pytest.raises(RuntimeError, match="step 4 is to be applied from gradients that this rank no longer holds"):
        held.redo(4)


def test_an_update_that_is_interrupted_belongs_to_no_step() -> None:
    live = MadeUpState(step=3)
    live.fails = True
    held = hold(live, ready=True)
    with pytest.raises(RuntimeError, match="interrupted"):
        held.redo(4)
    assert held.commit == at_3(torn=True)


def written(held: HeldState) -> bool:
    """Write to a tensor of ``held`` as another process's weights would; return whether the state is given up."""
    held.tensors["model", 0, "frozen"].add_(1)
    held.use()
    return held.commit.torn


def hold_frozen() -> HeldState:
    live = MadeUpState(step=3)
    live.present["model", 0, "frozen"] = torch.ones(5)
    return hold(live)


def test_what_a_script_writes_to_before_the_recovery_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    held = hold_frozen()
    assert written(held)
    assert "frozen was written to since the fault" in caplog.text


def test_a_recovery_may_write_and_what_is_written_behind_a_second_fault_is_given_up() -> None:
    held = hold_frozen()
    held.use()
    held.tensors["model", 0, "frozen"].add_(1)
    held.outlive()
    assert not held.commit.torn
    assert written(held)


def test_an_update_gives_way_if_memory_is_short_and_then_a_state_that_replicas_have() -> None:
    held = hold(ready=True)
    held.outlive()
    assert held.journal is not None
    held.outlive(memory_is_short=True)
    assert (held.journal, held.commit) == (None, at_3())
    held.is_superseded = True
    held.outlive()
    assert held.tensors
    held.outlive(memory_is_short=True)
    assert (held.commit.torn, dict(held.tensors)) == (True, {})


def test_a_state_that_no_replica_fills_is_kept_if_memory_is_short() -> None:
    """All ranks may be in the same place."""
    held = hold()
    held.outlive(memory_is_short=True)
    assert not held.commit.torn
    assert held.tensors


def test_an_update_that_no_other_rank_can_have_is_kept_if_memory_is_short() -> None:
    live = MadeUpState(step=3)
    live.all_holders = (0,)
    held = hold(live, ready=True)
    held.outlive(memory_is_short=True)
    assert held.journal is not None
    assert held.commit.ready


# --- How tensors are moved to host memory; tensors of 32-bit floats play those of a device ------------------------


def key(name: str) -> Key:
    return ("optimizer", 0, 0, 0, name)


def offloaded(tensors: dict[Key, torch.Tensor], pool: HostMemoryPool) -> HeldState:
    held = HeldState(at_3(), dict(tensors), {})
    held.offload(pool)
    return held


def test_what_lies_on_a_device_is_moved_and_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_state, "is_on_host", lambda tensor: tensor.dtype != torch.float32)
    tensors = {
        key("matrix"): torch.randn(7, 5).t(),
        key("nothing"): torch.randn(0, 3),
        key("number"): torch.tensor(3.0),
        key("here"): torch.arange(4),
    }
    pool = HostMemoryPool()
    held = offloaded(tensors, pool)
    assert list(held.tensors) == list(tensors)
    assert all(torch.equal(held.tensors[each], tensors[each]) for each in tensors)
    assert {each for each in tensors if held.tensors[each] is tensors[each]} == {key("number"), key("here")}
    held.tensors = {each: tensor.view(torch.int32) for each, tensor in held.tensors.items() if tensor.dim()}
    held.tensors[key("filled")] = torch.full((5,), 7.0)  # before a further fault
    before = {each: tensor.clone() for each, tensor in held.tensors.items()}
    held.offload(pool)
    offloaded({key("matrix"): torch.zeros(7, 5)}, pool)
    assert all(torch.equal(held.tensors[each], tensor) for each, tensor in before.items())
