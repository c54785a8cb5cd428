"""Test saves after a fault: what is made again, what goes on, and whose the writers' reports are."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointless.state.port import SnapshotPoint

pytestmark = pytest.mark.nemo


def test_each_save_has_its_own_reports(tmp_path: Path) -> None:
    """Of two that are under way the second may be written first."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from checkpointless.integrations.lightning.checkpoints.saves import Saves

    saves, queues = Saves(), []
    for name in ("a", "b"):
        make = lambda: queues.append(filesystem_async._get_write_results_queue())  # noqa: E731
        saves.save(str(tmp_path / name), (10, SnapshotPoint.COMMITTED), make)
    first, second = queues
    second.put("of the second")
    first.put("of the first")
    assert [first.get_nowait(), second.get_nowait()] == ["of the first", "of the second"]


# ---- what two ranks that are in the same place agree on


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpointless.integrations.lightning.checkpoints import saves

    monkeypatch.setattr(saves, "all_gather_json", lambda value: [value, value])


class Job:
    """Represents a rank with Megatron's queue of saves in the background, which does nothing of itself.

    Args:
        at_once: nothing is saved in the background.
    """

    def __init__(self, at_once: bool = False) -> None:
        from checkpointless.integrations.lightning.checkpoints.saves import Saves

        self.saves = Saves()
        self.at_once = at_once
        self.did: list[str] = []
        self.begin()

    def begin(self) -> None:
        """Make a new trainer, with a queue that is empty."""
        self.queue = SimpleNamespace(async_calls=deque(), call_idx=-1)
        self.strategy: Any = SimpleNamespace(
            checkpoint_io=SimpleNamespace(async_calls_queue=self.queue),
            trainer=SimpleNamespace(callbacks=[], is_global_zero=True),
        )

    def save(self, path: str, step: int, finish: str | None = None) -> None:
        def make() -> None:
            self.did.append("made")
            if self.at_once:
                return
            self.queue.call_idx += 1
            fns = [lambda: self.did.append("Megatron's end"), *([end] if end is not None else [])]
            request = SimpleNamespace(finalize_fns=fns)
            caller = SimpleNamespace(process=None)
            self.queue.async_calls.append(
                SimpleNamespace(idx=self.queue.call_idx, async_caller=caller, async_request=request)
            )

        end = None if finish is None else lambda: self.did.append(finish)
        calls: Any = None if self.at_once else self.queue
        self.saves.save(path, (step, SnapshotPoint.COMMITTED), make, calls, end)

    def finish(self) -> None:
        """Do what Megatron does when the writers are done."""
        while self.queue.async_calls:
            for each in self.queue.async_calls.popleft().async_request.finalize_fns:
                each()

    def fault(self, step: int | None, stage: SnapshotPoint = SnapshotPoint.COMMITTED) -> None:
        """Leave the block, and enter it again after ``step``, or from storage if it is None."""
        self.leave()
        self.saves.agree(None if step is None else (step, stage), self.strategy)

    def leave(self) -> None:
        """Leave the block."""
        from checkpointless.integrations.lightning.checkpoints.saves import PendingSaves

        pending = PendingSaves.of(self.strategy.checkpoint_io)
        self.saves.pending = pending if pending is not None else self.saves.pending
        self.begin()


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("finish", ["again", None])
def test_a_save_that_goes_on_is_ended_once_by_who_asks_for_it_now(finish: str | None) -> None:
    job = Job()
    job.save("/c/a", 10, None if finish is None else "before")
    job.fault(10)
    job.save("/c/a", 10, finish)
    job.finish()
    assert job.did == ["made", "Megatron's end", *([finish] if finish else [])]


@pytest.mark.usefixtures("alike")
def test_a_fault_while_the_ranks_agree_forgets_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpointless.integrations.lightning.checkpoints import saves

    def interrupted(value: object) -> list[object]:
        raise RuntimeError("aborted")

    job = Job()
    job.save("/c/a", 10, "before")
    with monkeypatch.context() as patched:
        patched.setattr(saves, "all_gather_json", interrupted)
        with pytest.raises(RuntimeError, match="aborted"):
            job.fault(10)
    job.fault(10)
    job.save("/c/a", 10, "again")
    job.finish()
    assert job.did == ["made", "Megatron's end", "again"]


@pytest.mark.usefixtures("alike")
def test_a_save_whose_end_was_interrupted_is_made_again() -> None:
    job = Job()
    job.save("/c/a", 10, "before")
    job.queue.async_calls.popleft()  # this is Megatron's first act, and then the fault comes
    job.fault(10)
    job.save("/c/a", 10, "again")
    job.finish()
    assert job.did == ["made", "made", "Megatron's end", "again"]


@pytest.mark.usefixtures("alike")
def test_a_save_that_was_ended_is_not_made_again(tmp_path: Path) -> None:
    job, path = Job(), tmp_path / "a"
    path.mkdir()
    job.save(str(path), 10, "before")
    job.finish()
    job.fault(10)
    job.save(str(path), 10, "again")
    assert job.did == ["made", "Megatron's end", "before"], "not before the callback has said what goes with it"
    job.finish()
    assert job.did == ["made", "Megatron's end", "before", "again"]
    assert job.queue.call_idx == 0


@pytest.mark.usefixtures("alike")
def test_a_save_of_a_life_that_is_not_gone_on_with_is_made_again(tmp_path: Path) -> None:
    job = Job(at_once=True)
    (tmp_path / "a").touch()
    job.save(str(tmp_path / "a"), 100)
    job.fault(None)
    job.fault(70)
    job.save(str(tmp_path / "a"), 100)
    assert job.did == ["made", "made"]


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("there", [True, False])
def test_what_was_saved_at_once_is_looked_for(there: bool, tmp_path: Path) -> None:
    job = Job(at_once=True)
    job.save(str(tmp_path / "a"), 10)
    if there:
        (tmp_path / "a").touch()
    job.fault(10)
    job.save(str(tmp_path / "a"), 10)
    assert job.did == ["made"] * (1 if there else 2)


@pytest.mark.usefixtures("alike")
def test_a_later_save_to_the_same_path_is_made(tmp_path: Path) -> None:
    job = Job(at_once=True)
    (tmp_path / "latest").touch()
    job.save(str(tmp_path / "latest"), 10)
    job.fault(10)
    job.save(str(tmp_path / "latest"), 20)
    assert job.did == ["made", "made"]


@pytest.mark.usefixtures("alike")
def test_a_save_before_the_moment_is_not_the_next_ones(tmp_path: Path) -> None:
    job = Job(at_once=True)
    (tmp_path / "a").touch()
    job.save(str(tmp_path / "a"), 10)
    job.fault(10, SnapshotPoint.CHECKED)
    job.save(str(tmp_path / "a"), 10)
    assert job.did == ["made", "made"]


@pytest.mark.usefixtures("alike")
def test_a_save_whose_end_failed_is_made_again_or_said_to_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.save("/c/a", 10)
    job.queue.async_calls.popleft()  # its end has begun, and failed
    assert job.saves.unfinished == ((0, 10, int(SnapshotPoint.COMMITTED), False),)
    job.fault(10, SnapshotPoint.TURNED)
    assert job.saves._lost == [("/c/a", {})]
    assert "could not be finished" in caplog.text
    assert job.saves.unfinished == (), "said once"

    again = Job()
    again.save("/c/a", 10)
    again.queue.async_calls.popleft()
    again.fault(10)
    assert again.saves._lost == []
    again.fault(10)  # another fault comes before it is made again
    again.save("/c/a", 10)
    assert again.did == ["made", "made"]


def test_a_process_that_knows_nothing_of_a_save_does_not_have_it_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the others have gone through the end of it, it is whole; it ends with them for the callback of now."""
    from checkpointless.integrations.lightning.checkpoints import saves

    def gather(first: Any, second: Any) -> None:
        """Let both agree on what each says."""
        said: list[Any] = []

        def listen(value: Any) -> list[Any]:
            said.append(value)
            return [value, value]

        with monkeypatch.context() as patched:
            patched.setattr(saves, "all_gather_json", listen)
            for job in (first, second):
                copied = saves.Saves()
                copied._made, copied.pending = list(job.saves._made), job.saves.pending
                copied.agree((10, SnapshotPoint.COMMITTED), Job().strategy)
        for job in (first, second):
            monkeypatch.setattr(saves, "all_gather_json", lambda value: said)
            job.saves.agree((10, SnapshotPoint.COMMITTED), job.strategy)

    (tmp_path / "a").mkdir()
    old, new, path = Job(), Job(), str(tmp_path / "a")
    old.save(path, 10, "before")
    old.finish()
    old.leave()
    gather(old, new)
    for job in (old, new):
        job.save(path, 10, "again")
        job.finish()
    assert old.did == ["made", "Megatron's end", "before", "again"]
    assert new.did == ["again"]
    assert old.queue.call_idx == new.queue.call_idx


@pytest.mark.usefixtures("alike")
def test_a_save_that_ended_and_is_still_marked_is_made_again(tmp_path: Path) -> None:
    """NeMo passes over an error at the barrier before it removes the mark, and removes what is marked."""
    from nemo.lightning.pytorch.callbacks import ModelCheckpoint

    job, path = Job(), tmp_path / "a"
    path.mkdir()
    job.save(str(path), 10)
    job.finish()
    ModelCheckpoint.format_checkpoint_unfinished_marker_path(path).touch()
    job.fault(10)
    job.save(str(path), 10)
    assert job.did.count("made") == 2


@pytest.mark.usefixtures("alike")
def test_a_save_that_a_rank_was_interrupted_in_is_made_again_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpointless.integrations.lightning.checkpoints import saves

    def interrupted() -> None:
        raise KeyboardInterrupt

    job = Job()
    with monkeypatch.context() as patched:
        patched.setattr(saves._Save, "finished", property(lambda save: interrupted()))
        with pytest.raises(KeyboardInterrupt):
            job.save("/c/a", 10)  # its writer works, and this rank does not know that it has begun it
    job.leave()
    assert job.saves.unfinished == ((0, 10, int(SnapshotPoint.COMMITTED), True),)
    job.saves.agree((10, SnapshotPoint.COMMITTED), job.strategy)
    assert not job.queue.async_calls
    job.save("/c/a", 10)
    assert job.did == ["made", "made"]


@pytest.mark.usefixtures("alike")
def test_the_end_of_one_that_goes_on_is_noticed_by_a_rank_that_was_interrupted_behind_its_begin() -> None:
    job = Job()
    job.save("/c/a", 10)
    (call,) = job.queue.async_calls
    call.async_request.finalize_fns.pop()  # the rank was interrupted before that
    job.fault(10, SnapshotPoint.TURNED)
    job.finish()
    job.leave()
    assert job.saves.unfinished == ()


@pytest.mark.usefixtures("alike")
def test_a_save_that_is_lost_takes_no_other_along(tmp_path: Path) -> None:
    from nemo.lightning.pytorch.callbacks import ModelCheckpoint

    def marked(name: str) -> str:
        (tmp_path / name).mkdir()
        ModelCheckpoint.format_checkpoint_unfinished_marker_path(tmp_path / name).touch()
        return str(tmp_path / name)

    lost, pending = marked("lost"), marked("pending")
    job = Job()
    callback = ModelCheckpoint(dirpath=str(tmp_path), monitor="val_loss", save_top_k=2)
    job.strategy.trainer.callbacks = callbacks = [callback]
    job.save(lost, 9)
    job.save(pending, 10)
    job.queue.async_calls.popleft()  # its end has begun, and failed
    job.leave()
    job.strategy.trainer.callbacks = callbacks
    job.saves.agree((10, SnapshotPoint.TURNED), job.strategy)
    callback.best_k_models = {lost: torch.tensor(1.0), pending: torch.tensor(2.0)}
    job.saves.forget_lost(callbacks)
    assert not Path(lost).exists()
    assert Path(pending).exists()
    assert list(callback.best_k_models) == [pending]
    assert len(job.queue.async_calls) == 1


# ---- what callbacks count


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("is_new_process", [False, True])
def test_what_a_lost_save_was_to_remove_has_its_place_again(tmp_path: Path, is_new_process: bool) -> None:
    """Else the next save would not remove it, and it would stay for ever."""
    from nemo.lightning.pytorch.callbacks import ModelCheckpoint

    from checkpointless.integrations.lightning.checkpoints.saves import Saves, _books_of

    older, lost = str(tmp_path / "step=1-last.ckpt"), str(tmp_path / "step=3-last.ckpt")
    job, callback = Job(), ModelCheckpoint(dirpath=str(tmp_path), save_last=True, save_top_k=0)
    callback.last_model_path = older
    books = _books_of(callback)
    job.save(lost, 9)
    callback.last_model_path = lost
    callback.deferred_ckpts_to_remove.append([older])
    job.saves.keep(lost, callback, books)
    job.queue.async_calls.popleft()  # its end has begun, and failed
    job.leave()
    job.saves.agree((10, SnapshotPoint.TURNED), job.strategy)
    assert callback.deferred_ckpts_to_remove == []
    if is_new_process:
        job.saves, known = Saves(), job.saves._lost
        job.saves._lost = known
    job.saves.forget_lost([callback, object()])
    assert callback.last_model_path == older


@pytest.mark.usefixtures("alike")
def test_what_a_save_has_replaced_is_known_while_it_is_asked_for_again(tmp_path: Path) -> None:
    """Another fault may come before its callback has kept it once more."""
    from nemo.lightning.pytorch.callbacks import ModelCheckpoint

    from checkpointless.integrations.lightning.checkpoints.saves import _books_of

    job, callback, path = Job(), ModelCheckpoint(dirpath=str(tmp_path)), str(tmp_path / "step=3-last.ckpt")
    callback.last_model_path = "older"
    books = _books_of(callback)
    job.save(path, 10)
    callback.deferred_ckpts_to_remove.append(["older"])
    job.saves.keep(path, callback, books)
    job.fault(10)
    job.save(path, 10)
    (save,) = job.saves._made
    assert save.replaced["last"] == "older"
    save.spare()
    assert callback.deferred_ckpts_to_remove == []
