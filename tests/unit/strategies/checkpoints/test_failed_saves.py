"""Test what a rank does about saves that fail: who gives up what, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.nemo


class Rank:
    """Represents rank 0 of two that are in the same place, at the end of step 3."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from checkpointless.integrations.lightning.checkpoints import saves

        monkeypatch.setattr(saves, "all_gather_json", lambda value: [value, value])
        self.removed: list[str] = []
        monkeypatch.setattr(saves, "remove", self.removed.extend)
        self.saves = saves.Saves()
        self.failed = self.saves.failed
        self.step = 3
        self.strategy: Any = SimpleNamespace(
            trainer=SimpleNamespace(is_global_zero=True, global_rank=0),
            checkpoint_manager=SimpleNamespace(saves=self.saves),
            journal=lambda: SimpleNamespace(newest=(self.step, 0)),
        )
        self.failed._strategy = lambda: self.strategy

    def save(self, path: str, error: BaseException | None = None) -> None:
        with self.failed.attempt(path):
            if error is not None:
                raise error


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RuntimeError("file write failed")])
def test_saves_of_a_step_are_given_up_after_one_rank_raised_in_one(rank: Rank, error: Exception) -> None:
    from checkpointless.integrations.lightning.checkpoints.saves import _SaveFailed

    with pytest.raises(type(error)):
        rank.save("/c/a.ckpt", error)
    assert rank.failed.raised == (3, str(error))
    for _ in range(2):  # another fault may come before they are given up
        rank.failed.give_up([None, rank.failed.raised], 3)
    for path in ("/c/a.ckpt", "/c/a-last.ckpt"):
        with pytest.raises(_SaveFailed, match="could not be saved") as raised:
            rank.save(path)
        assert raised.value.reasons == {1: str(error)}
    assert rank.removed == ["/c/a.ckpt", "/c/a-last.ckpt"]
    rank.step = 4
    rank.save("/c/b.ckpt")


def test_saves_are_made_if_training_resumes_at_another_step(rank: Rank) -> None:
    with pytest.raises(OSError, match="full"):
        rank.save("/c/a.ckpt", OSError("full"))
    rank.failed.give_up([rank.failed.raised, None], 2)
    assert rank.failed.raised is None
    rank.save("/c/a.ckpt")


def test_a_save_that_the_loss_of_a_rank_ends_is_not_given_up(rank: Rank) -> None:
    with pytest.raises(RuntimeError):
        rank.save("/c/a.ckpt", RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert rank.failed.raised is None


@pytest.mark.parametrize("failures", [{1: (RuntimeError("Worker failure: full"), None)}, {}])
def test_what_all_ranks_raise_ends_the_save_at_once(rank: Rank, failures: dict[int, Any]) -> None:
    from torch.distributed.checkpoint import CheckpointException

    from checkpointless.integrations.lightning.checkpoints.saves import _SaveFailed

    with pytest.raises(_SaveFailed) as raised:
        rank.save("/c/a.ckpt", CheckpointException("write", failures))
    assert raised.value.reasons == ({1: "full"} if failures else {0: "a part of it could not be written"})


def test_an_error_of_what_one_rank_writes_is_gathered(rank: Rank) -> None:
    from checkpointless.integrations.lightning.checkpoints.saves import _noting, _SaveFailed

    def write(folder: str) -> None:
        raise OSError(28, "No space left on device")

    noted = _noting(lambda folder: folder)(write)
    with pytest.raises(OSError, match="No space"):
        noted("/c/a/weights")  # of a save that is not ours
    with rank.failed.attempt("/c/a.ckpt"):
        noted("/c/a/weights")
        noted("/c/a")
    with pytest.raises(_SaveFailed) as raised:
        rank.failed.agree("/c/a.ckpt")
    assert raised.value.reasons == dict.fromkeys((0, 1), "[Errno 28] No space left on device")
    rank.failed.agree("/c/a.ckpt")


def test_a_failed_save_ends_the_job_if_that_is_asked_for(rank: Rank) -> None:
    from checkpointless.inprocess import UnrecoverableError

    rank.failed.on_error = "raise"
    with pytest.raises(UnrecoverableError, match="on_save_error is 'raise'"):
        rank.failed.fail("/c/a.ckpt", {0: "full"})


def test_an_error_of_torch_on_a_full_disk_is_said_to_be_that(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpointless.integrations.lightning.checkpoints import saves

    monkeypatch.setattr(saves, "_is_full", lambda folder: folder == "/c")
    rank.failed.note(RuntimeError("unexpected pos 64 vs 0"), "/c/a.ckpt")
    assert rank.failed.raised == (3, "No space left on device")
