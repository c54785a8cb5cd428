"""Test saves of NeMo's: what is made again after a fault, what goes on, what is lost, and what fails."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, PropertyMock, patch

import pytest

pytest.importorskip("nemo.lightning", reason="needs NeMo")

import torch
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from nemo.lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import CheckpointException

from checkpointless.inprocess import StateLostError, UnrecoverableError
from checkpointless.integrations.lightning.checkpoints import saves
from checkpointless.integrations.lightning.checkpoints.connector import CheckpointlessCompatibleConnector
from checkpointless.integrations.lightning.checkpoints.saves import Saves, _books_of, _SaveFailed, _undo, _Word
from checkpointless.state.port import SnapshotPoint

pytestmark = pytest.mark.nemo


@pytest.fixture(autouse=True)
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "all_gather_json", lambda value: [value, value])


END = "Megatron's end"


class Job:
    """Represents a rank with Megatron's queue of saves in the background, which does nothing of itself."""

    def __init__(self, at_once: bool = False) -> None:
        self.saves = Saves()
        self.at_once = at_once
        self.did: list[str] = []
        self.begin()

    def begin(self) -> None:
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
            request = SimpleNamespace(finalize_fns=[lambda: self.did.append(END), *([end] if end else [])])
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
        self.saves.keep_pending(self.strategy.checkpoint_io)
        self.begin()

    def begin_end(self) -> None:
        """Do Megatron's first act at the end of a save, which then fails, or is interrupted."""
        self.queue.async_calls.popleft()


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.mark.parametrize(
    ("before", "again", "is_interrupted", "did"),
    [
        ("before", "again", False, ["made", END, "again"]),
        (None, None, False, ["made", END]),
        ("before", "again", True, ["made", "made", END, "again"]),
    ],
)
def test_a_save_that_goes_on_is_ended_once_by_who_asks_for_it_now_and_made_again_if_its_end_was_interrupted(
    job: Job, before: str | None, again: str | None, is_interrupted: bool, did: list[str]
) -> None:
    job.save("/c/a", 10, before)
    if is_interrupted:
        job.begin_end()
    job.fault(10)
    job.save("/c/a", 10, again)
    job.finish()
    assert job.did == did


def test_a_fault_while_the_ranks_agree_forgets_no_save(job: Job) -> None:
    job.save("/c/a", 10, "before")
    aborted = patch.object(saves, "all_gather_json", side_effect=RuntimeError("aborted"))
    with aborted, pytest.raises(RuntimeError, match="aborted"):
        job.fault(10)
    job.fault(10)
    job.save("/c/a", 10, "again")
    job.finish()
    assert job.did == ["made", END, "again"]


def test_a_save_that_was_ended_is_not_made_again(job: Job, tmp_path: Path) -> None:
    path = str(tmp_path)
    job.save(path, 10, "before")
    job.finish()
    job.fault(10)
    job.save(path, 10, "again")
    assert job.did == ["made", END, "before"], "not before the callback has said what goes with it"
    job.finish()
    assert (job.did, job.queue.call_idx) == (["made", END, "before", "again"], 0)


@pytest.mark.parametrize(
    ("there", "faults", "step", "times"),
    [
        (True, [(10,)], 10, 1),
        (False, [(10,)], 10, 2),
        (True, [(None,), (7,)], 10, 2),  # its life is not gone on with
        (True, [(10,)], 20, 2),  # a later save to the same path
        (True, [(10, SnapshotPoint.CHECKED)], 10, 2),  # it was before the point
    ],
    ids=["there", "gone", "other-life", "later-step", "before-the-point"],
)
def test_what_was_saved_at_once_is_made_again_unless_it_is_there(
    there: bool, faults: list[Any], step: int, times: int, tmp_path: Path
) -> None:
    job, path = Job(at_once=True), tmp_path / "a"
    job.save(str(path), 10)
    if there:
        path.touch()
    for fault in faults:
        job.fault(*fault)
    job.save(str(path), step)
    assert job.did == ["made"] * times


def test_a_save_whose_end_failed_is_made_again_or_said_to_be_lost(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.save("/c/a", 10)
    job.begin_end()
    assert job.saves.unfinished == ((0, 10, int(SnapshotPoint.COMMITTED), False),)
    job.fault(10, SnapshotPoint.TURNED)
    assert job.saves._lost == [("/c/a", {})]
    assert "could not be finished" in caplog.text
    assert job.saves.unfinished == (), "said once"

    again = Job()
    again.save("/c/a", 10)
    again.begin_end()
    again.fault(10)
    assert again.saves._lost == []
    again.fault(10)  # another fault comes before it is made again
    again.save("/c/a", 10)
    assert again.did == ["made", "made"]


def test_a_process_that_knows_nothing_of_a_save_ends_it_with_the_others(job: Job) -> None:
    """Where the others have gone through the end of it, it is whole; it ends with them for the callback of now."""
    job.saves._again, job.saves._whole, job.saves._resumed_step = {"/c/a"}, {"/c/a": 0}, 10
    job.save("/c/a", 10, "again")
    job.finish()
    assert (job.did, job.queue.call_idx) == (["again"], 0)


def test_a_save_that_ended_and_is_still_marked_is_made_again(job: Job, tmp_path: Path) -> None:
    """NeMo passes over an error at the barrier before it removes the mark, and removes what is marked."""
    path = tmp_path / "a"
    path.mkdir()
    job.save(str(path), 10)
    job.finish()
    ModelCheckpoint.format_checkpoint_unfinished_marker_path(path).touch()
    job.fault(10)
    job.save(str(path), 10)
    assert job.did.count("made") == 2


def test_a_save_that_a_rank_was_interrupted_in_is_made_again_by_all(job: Job) -> None:
    interrupted = patch.object(saves._Save, "finished", PropertyMock(side_effect=KeyboardInterrupt))
    with interrupted, pytest.raises(KeyboardInterrupt):
        job.save("/c/a", 10)  # its writer works, and this rank does not know that it has begun it
    job.leave()
    assert job.saves.unfinished == ((0, 10, int(SnapshotPoint.COMMITTED), True),)
    job.saves.agree((10, SnapshotPoint.COMMITTED), job.strategy)
    assert not job.queue.async_calls
    job.save("/c/a", 10)
    assert job.did == ["made", "made"]


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_save_that_is_lost_takes_no_other_along_and_stays_if_it_is_whole(
    job: Job, tmp_path: Path, is_whole: bool
) -> None:
    """NeMo removes the mark when all ranks have written, and then links the last checkpoint, and waits for all."""

    def made(name: str, is_marked: bool) -> str:
        (tmp_path / name).mkdir()
        if is_marked:
            ModelCheckpoint.format_checkpoint_unfinished_marker_path(tmp_path / name).touch()
        return str(tmp_path / name)

    lost, pending = made("lost", not is_whole), made("pending", True)
    callback = ModelCheckpoint(dirpath=str(tmp_path), monitor="val_loss", save_top_k=2)
    job.strategy.trainer.callbacks = callbacks = [callback]
    job.save(lost, 9)
    job.save(pending, 10)
    job.begin_end()
    job.leave()
    job.strategy.trainer.callbacks = callbacks
    job.saves.agree((10, SnapshotPoint.TURNED), job.strategy)
    callback.best_k_models = {lost: torch.tensor(1.0), pending: torch.tensor(2.0)}
    job.saves.forget_lost(callbacks)
    assert (Path(lost).exists(), Path(pending).exists()) == (is_whole, True)
    assert list(callback.best_k_models) == [pending]
    assert len(job.queue.async_calls) == 1


@pytest.mark.parametrize("is_new_process", [False, True])
def test_what_a_lost_save_was_to_remove_has_its_place_again(job: Job, tmp_path: Path, is_new_process: bool) -> None:
    """Else the next save would not remove it, and it would stay for ever."""
    older, lost = str(tmp_path / "step=1-last.ckpt"), str(tmp_path / "step=3-last.ckpt")
    callback = ModelCheckpoint(dirpath=str(tmp_path), save_last=True, save_top_k=0)
    callback.last_model_path = older
    books = _books_of(callback)
    job.save(lost, 9)
    callback.last_model_path = lost
    callback.deferred_ckpts_to_remove.append([older])
    job.saves.keep(callback, books)
    job.begin_end()
    job.fault(10, SnapshotPoint.TURNED)
    assert callback.deferred_ckpts_to_remove == []
    if is_new_process:
        known, job.saves = job.saves._lost, Saves()
        job.saves._lost = known
    job.saves.forget_lost([callback, object()])
    assert callback.last_model_path == older


def says(state: str, number: int | None = 0, passed: bool = True) -> _Word:
    return _Word(number, passed, state, {})


@pytest.mark.parametrize(
    ("words", "fate"),
    [
        ([says("pending")] * 2, "whole"),
        ([says("pending", passed=False), says("pending", passed=False)], "goes on"),
        ([says("pending"), says("begun")], "again"),
        ([says("pending"), None], "again"),
        ([None, says("pending", passed=False)], "lost"),
        ([says("pending", passed=False), says("begun", passed=False)], "lost"),
        ([says("pending"), says("done")], "again"),
        ([None, says("done")], "whole"),
        ([says("done", None), says("done", None)], "whole"),
        ([says("done", None), says("begun", None)], "whole"),  # the first rank's part is the last
        ([says("begun", None), says("done", None)], "again"),
        ([None, says("done", None)], "again"),
        ([says("done", 1), says("done", 2)], "again"),
    ],
)
def test_what_becomes_of_a_save(words: list[_Word | None], fate: str) -> None:
    assert saves._fate(words, in_background=True) == fate
    if fate == "goes on":
        assert saves._fate(words, in_background=False) == "lost"


def test_an_answer_that_nobody_has_read_is_not_taken_for_the_next() -> None:
    before = filesystem_async._get_write_results_queue()
    before.put("of a save that was interrupted")
    before._tls.connection.send((before._id, "empty", (), {}))  # it is interrupted before the answer comes
    saves._reset_reports()
    after = filesystem_async._get_write_results_queue()
    assert after.empty() is True
    assert before.empty() is False, "whoever goes on with that save gets its report"
    after.put("of the next save")
    told = [after.get_nowait(), before.get_nowait()]
    assert told == ["of the next save", "of a save that was interrupted"]
    for reports in (before, after):
        with pytest.raises(queue.Empty):
            reports.get_nowait()


def test_reports_whose_process_is_gone_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    reports = filesystem_async._get_write_results_queue()
    reports._manager._process.kill()
    reports._manager._process.join()
    saves._report_separately()
    again = filesystem_async._get_write_results_queue()
    again.put("of the next save")
    assert again.get_nowait() == "of the next save"


@pytest.fixture
def callback() -> Any:
    made = ModelCheckpoint(dirpath="/ckpt", monitor="loss", save_top_k=2)
    made.best_k_models = {"/ckpt/good.ckpt": torch.tensor(0.5), "/ckpt/bad.ckpt": torch.tensor(0.9)}
    made.last_model_path = "/ckpt/old-last.ckpt"
    return made


def save(callback: Any) -> None:
    """Do to the books what NeMo does in a background save of ``new``, which is the best."""
    worst = max(callback.best_k_models, key=lambda path: float(callback.best_k_models[path]))
    del callback.best_k_models[worst]
    callback.best_k_models["/ckpt/new.ckpt"] = torch.tensor(0.1)
    callback.best_model_path, callback.kth_best_model_path = "/ckpt/new.ckpt", "/ckpt/good.ckpt"
    callback.best_model_score, callback.kth_value = torch.tensor(0.1), torch.tensor(0.5)
    callback.deferred_ckpts_to_remove.append([worst])


def books(callback: Any) -> dict[str, Any]:
    return {
        "models": {path: float(score) for path, score in callback.best_k_models.items()},
        "best": (callback.best_model_path, float(callback.best_model_score)),
        "worst": (callback.kth_best_model_path, float(callback.kth_value)),
        "last": callback.last_model_path,
    }


RIGHT = {
    "models": {"/ckpt/good.ckpt": 0.5, "/ckpt/bad.ckpt": pytest.approx(0.9)},
    "best": ("/ckpt/good.ckpt", 0.5),
    "worst": ("/ckpt/bad.ckpt", pytest.approx(0.9)),
    "last": "/ckpt/old-last.ckpt",
}


def test_books_are_put_back(callback: Any) -> None:
    earlier = ["/ckpt/earlier"]
    callback.deferred_ckpts_to_remove.append(earlier)
    before = _books_of(callback)
    save(callback)
    vars(callback).update(before)
    (removal,) = callback.deferred_ckpts_to_remove
    assert removal is earlier
    assert set(callback.best_k_models) == {"/ckpt/good.ckpt", "/ckpt/bad.ckpt"}


def test_a_background_save_that_fails_later_is_struck_out(callback: Any) -> None:
    before = _books_of(callback)
    save(callback)
    was = json.loads(json.dumps(saves._replaced(callback, before)))  # another process gets it so
    for _ in range(2):  # the second time there is nothing of it any more
        _undo(callback, "/ckpt/new.ckpt", was)
        assert books(callback) == RIGHT


class Rank:
    """Represents rank 0 of two that are in the same place, at the end of step 3."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.removed: list[str] = []
        monkeypatch.setattr(saves, "_remove", self.removed.extend)
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
    with pytest.raises(_SaveFailed) as raised:
        rank.save("/c/a.ckpt", CheckpointException("write", failures))
    assert raised.value.reasons == ({1: "full"} if failures else {0: "a part of it could not be written"})


def test_an_error_of_what_one_rank_writes_is_gathered(rank: Rank) -> None:
    noted = saves._noting(lambda folder: folder)(Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        noted("/c/a/weights")  # of a save that is not ours
    with rank.failed.attempt("/c/a.ckpt"):
        noted("/c/a/weights")
        noted("/c/a")
    with pytest.raises(_SaveFailed) as raised:
        rank.failed.agree("/c/a.ckpt")
    assert raised.value.reasons == dict.fromkeys((0, 1), "[Errno 28] No space left on device")
    rank.failed.agree("/c/a.ckpt")


def test_an_error_of_torch_on_a_full_disk_is_said_to_be_that(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    rank.failed.note(RuntimeError("unexpected pos 64 vs 0"), str(tmp_path / "a.ckpt"))
    assert rank.failed.raised == (3, "No space left on device")


def test_a_kill_while_a_checkpoint_is_removed_leaves_nothing_that_passes_for_one(tmp_path: Path) -> None:
    path = tmp_path / "it-step=3-last"
    (path / "weights").mkdir(parents=True)
    (path / "weights" / "metadata.json").touch()
    with patch.object(shutil, "rmtree", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        saves.remove_whole(path)
    assert not path.exists()
    (left,) = (each for each in tmp_path.iterdir() if each.is_dir())
    assert ModelCheckpoint.is_checkpoint_unfinished(left)
    ModelCheckpoint._remove_unfinished_checkpoints(tmp_path)
    assert not list(tmp_path.iterdir())


def written(monkeypatch: pytest.MonkeyPatch, *acts: Callable[[], Any]) -> Any:
    """Return what a rank is told when each of its writers does one of ``acts``."""

    def write(transforms: Any, number: int, bucket: Any, results: Any, count: Any, **kwargs: Any) -> None:
        results.put((number, bucket()))
        count.get()
        count.task_done()

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write))
    results: queue.Queue[Any] = queue.Queue()
    saves._write_buckets([], False, 0, acts, results)
    return results.get_nowait()


def test_each_writers_results_are_told_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    large = [b"x" * 100_000] * 3  # more than a pipe holds
    assert written(monkeypatch, lambda: ["a"], lambda: large) == {0: ["a"], 1: large}


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended with signal 9"),
        (lambda: os._exit(3), "ended with exit code 3"),
    ],
)
def test_a_writer_that_ends_without_a_word_is_noticed(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[], Any], told: str
) -> None:
    error = written(monkeypatch, lambda: ["a"], end)
    assert isinstance(error, RuntimeError)
    assert str(error).endswith(told)


def test_writers_do_not_outlive_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "_said", Mock(side_effect=KeyboardInterrupt))
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        written(monkeypatch, lambda: time.sleep(50))
    assert set(multiprocessing.active_children()) <= before


# --- How storage is read, and what is said of what cannot be ------------------------------------------------------


def test_a_writer_writes_where_the_kernel_ends_no_orphans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "die_with_parent", Mock(side_effect=OSError("prctl is not permitted")))
    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", written := Mock())
    saves._write([], False, 1, "bucket", Mock())
    assert written.call_args.args[:3] == ([], 1, "bucket")


def connector(**trainers: Any) -> CheckpointlessCompatibleConnector:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(), lightning_module=None, **trainers)
    return CheckpointlessCompatibleConnector(trainer)


def lost_with(ckpt_path: Path | None, of: CheckpointlessCompatibleConnector, kind: type[BaseException]) -> str:
    """Return what is said where neither a rank nor storage has the state."""
    manager = SimpleNamespace(refusal="all holders died", verdict=None, allow_restart_from_scratch=False)
    call = SimpleNamespace(high_water=4, generation=1, incident="1")
    with pytest.raises(kind) as caught:
        of._from_storage(ckpt_path, {}, manager, call)
    return str(caught.value)


@pytest.mark.parametrize("options", [{}, {"weights_only": True}], ids=["2.4", "2.6"])
def test_how_storage_is_read_is_passed_on(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(_CheckpointConnector, "resume_start", asked := Mock())
    connector().resume_start("a.ckpt", **options)
    asked.assert_called_once_with("a.ckpt", **options)


@pytest.mark.parametrize(
    ("delayed", "where"),
    [
        (None, "(fit() was given no ckpt_path)"),
        (SimpleNamespace(looks_in="runs/gpt/checkpoints", setup=lambda *_, **__: None), "(looked for in runs/gpt"),
    ],
)
def test_the_last_line_says_where_a_checkpoint_was_looked_for(delayed: Any, where: str) -> None:
    said = lost_with(None, connector(ckpt_path=None, fresume=delayed), StateLostError)
    assert f"all holders died; there is no checkpoint on storage to fall back to {where}" in said


@pytest.mark.parametrize("others", [["x-step=1-last"], []])
def test_a_checkpoint_that_cannot_be_loaded_is_named_and_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: list[str]
) -> None:
    unreadable = RuntimeError("PytorchStreamReader failed reading zip archive: failed finding central directory")
    monkeypatch.setattr(_CheckpointConnector, "resume_start", Mock(side_effect=unreadable))
    damaged = tmp_path / "x-step=3-last" / "weights"
    for folder in (*(tmp_path / each for each in others), damaged):
        folder.mkdir(parents=True)
    said = lost_with(damaged, connector(), UnrecoverableError)
    assert f"the checkpoint {damaged.parent} cannot be loaded (RuntimeError: PytorchStreamReader failed" in said
    assert ("the one before it, x-step=1-last" if others else f"no other is in {tmp_path}") in said
