"""Saves after a fault: what is made again, what goes on, and whose the writers' reports are."""

from __future__ import annotations

import queue
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointless.recovery.moment import Stage

pytestmark = pytest.mark.nemo


@pytest.mark.parametrize("keep", [False, True])
def test_an_answer_that_nobody_has_read_is_not_taken_for_the_next(keep: bool) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from checkpointless.strategies.saves import reset_reports

    reports = filesystem_async._get_write_results_queue()
    reports.put("of a save that was interrupted")
    reports._tls.connection.send((reports._id, "empty", (), {}))  # and interrupted before the answer came
    reset_reports(keep=keep)
    assert reports.empty() is not keep
    if not keep:
        reports.put("of the next save")
        assert reports.get_nowait() == "of the next save"
    else:
        assert reports.get_nowait() == "of a save that was interrupted"
    with pytest.raises(queue.Empty):
        reports.get_nowait()


# ---- what the ranks agree on; two that are in the same place


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpointless.strategies import saves

    monkeypatch.setattr(saves, "all_gather_json", lambda value: [value, value])


class Job:
    """A rank with Megatron's queue of saves in the background, which does nothing of itself.

    Args:
        at_once: nothing is saved in the background.
    """

    def __init__(self, at_once: bool = False) -> None:
        from checkpointless.strategies.saves import Saves

        self.saves = Saves()
        self.at_once = at_once
        self.did: list[str] = []
        self.begin()

    def begin(self) -> None:
        """A new trainer, with a queue that is empty."""
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
        self.saves.save(path, (step, Stage.COMMITTED), None if self.at_once else self.queue, end, make)

    def finish(self) -> None:
        """What Megatron does when the writers are done."""
        while self.queue.async_calls:
            for each in self.queue.async_calls.popleft().async_request.finalize_fns:
                each()

    def fault(self, step: int | None, stage: Stage = Stage.COMMITTED) -> None:
        """The block is left, and entered again after ``step``; None: from storage."""
        self.leave()
        self.saves.agree(None if step is None else (step, stage), self.strategy)

    def leave(self) -> None:
        """The block is left."""
        from checkpointless.strategies.saves import PendingSaves

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
    from checkpointless.strategies import saves

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
    job.queue.async_calls.popleft()  # Megatron's first act, and then the fault comes
    job.fault(10)
    job.save("/c/a", 10, "again")
    job.finish()
    assert job.did == ["made", "made", "Megatron's end", "again"]


@pytest.mark.usefixtures("alike")
def test_a_save_that_was_ended_is_not_made_again() -> None:
    job = Job()
    job.save("/c/a", 10, "before")
    job.finish()
    job.fault(10)
    job.save("/c/a", 10, "again")
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
    job.fault(10, Stage.CHECKED)
    job.save(str(tmp_path / "a"), 10)
    assert job.did == ["made", "made"]
