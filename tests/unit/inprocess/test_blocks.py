"""Test where a block is entered, what is found there after a fault, and what is done about its exception."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.hooks import RemovableHandle

from checkpointless.inprocess import exceptions, wrap
from checkpointless.inprocess.exceptions import RankShouldRestart, is_victim, line_of, words_of
from checkpointless.inprocess.generation import Generation, StepTracker
from checkpointless.inprocess.wrap import _Blocks, _Entry, _is_return, _Pause, _Succession, _traceback_of
from checkpointless.launcher.protocol.board import Facts
from checkpointless.launcher.protocol.causes import exit_code
from checkpointless.launcher.protocol.messages import Pause, Paused, RankMessage
from tests.unit.inprocess.test_interruptions import NoAgent

SCRIPT = """
import multiprocessing as mp
from checkpointless import HPWrapper

def work(queue):
    queue.put("worked")

@HPWrapper({settings})
def main():
    return "entered"

def inner(queue):
    from checkpointless.inprocess.wrap import _is_imported_by_child
    queue.put(_is_imported_by_child(inner))

if mp.current_process().name == "MainProcess":
    context = mp.get_context("{method}")
    for target, wanted in ((work, "worked"), (inner, False)):
        queue = context.Queue()
        process = context.Process(target=target, args=(queue,))
        process.start()
        assert queue.get(timeout=240) == wanted
        process.join()
else:
    assert main() is None
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_no_block_is_entered_where_a_child_imports_the_script(tmp_path: Path, method: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(settings="", method=method))
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "under `if __name__" in ended.stderr


def test_modes_that_were_changed_for_a_while_are_as_before() -> None:
    before = _Entry()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
    finally:
        before.restore()
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float32, True)
    assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == (False, torch.bfloat16)


REGISTER: dict[str, Callable[[Callable[..., None]], RemovableHandle]] = {
    "forward": lambda hook: modules.register_module_forward_hook(hook, always_call=True, with_kwargs=True),
    "before backward": modules.register_module_full_backward_pre_hook,
    "parameter": modules.register_module_parameter_registration_hook,
    "after the step": optimizers.register_optimizer_step_post_hook,
}


def _step() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 2, requires_grad=True)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", REGISTER)
def test_hooks_for_all_modules_are_there_once_however_often_the_block_registers_them(kind: str) -> None:
    called: list[str] = []
    handles = [REGISTER[kind](lambda *_, **__: called.append("before"))]
    try:
        entry = _Entry()
        for _ in range(3):
            handles.append(REGISTER[kind](lambda *_, **__: called.append("each time")))
            called.clear()
            _step()
            assert called.count("each time") == called.count("before") > 0
            handles[0].remove()
            entry.restore()
    finally:
        for each in handles:
            each.remove()
    called.clear()
    _step()
    assert not called, "those who hold a handle can still remove what is registered"


def test_a_relative_chdir_leads_to_the_same_folder_at_each_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = _Entry()
    for _ in range(2):
        os.makedirs("outputs", exist_ok=True)
        os.chdir("outputs")
        assert Path.cwd() == tmp_path / "outputs"
        before.restore()


# --- What is done about the exception that ended a block ----------------------------------------------------------


class Built:
    def __init__(self) -> None:
        self.itself = self


def error_beside(built: list[weakref.ref[Built]], kind: type[Exception]) -> Exception:
    """Return an exception that was raised for another, beside something large."""

    def build() -> None:
        large = Built()
        built.append(weakref.ref(large))
        raise kind("no more")

    try:
        try:
            build()
        except Exception as first:
            raise kind(f"{first} when it was built") from first
    except Exception as error:
        return error
    raise AssertionError


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_room_is_made_if_there_is_no_more_memory(kind: type[Exception]) -> None:
    built: list[weakref.ref[Built]] = []
    assert exceptions.make_room(error_beside(built, kind))
    assert built[0]() is None


def test_an_allocation_that_the_host_refuses_is_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert exceptions.is_out_of_memory(refused.value)


SUCCESSES = [(None, 0), (0, 0), (False, 0)]
FAILURES = [(True, 1), (3, 3), (256, 1), (-256, 1), (-1, 255), (1 << 70, 1), ("", 1), (0.0, 1)]


@pytest.mark.parametrize(("code", "status"), [*SUCCESSES, *FAILURES])
def test_only_nothing_and_0_are_a_success(code: Any, status: int) -> None:
    assert exit_code(SystemExit(code)) == status
    assert _is_return(SystemExit(code)) == (status == 0)


class Unspeakable(RuntimeError):
    def __getattribute__(self, name: str) -> Any:
        if name == "__notes__":
            raise ValueError("no notes")
        return super().__getattribute__(name)

    def __str__(self) -> str:
        raise self


Unspeakable.__name__ = "One\ncheckpointless: the job has ended\x1b[2J"


def test_an_exception_need_not_be_able_to_say_anything() -> None:
    error = Unspeakable()
    shown = "One checkpointless: the job has ended\\x1b[2J"
    assert words_of(error) == (shown, f"<its __str__ raised {shown}>")
    assert line_of(error) == ": ".join(words_of(error))
    assert line_of(error) in _traceback_of(error)
    assert not is_victim(error)


def test_causes_may_go_in_circles() -> None:
    first, second = RuntimeError("one"), RuntimeError("NCCL")
    first.__cause__, second.__cause__ = second, first
    assert is_victim(first)
    second.args = ("two",)
    assert not is_victim(first)


# --- Which ends of a block say that its process cannot enter it again ---------------------------------------------


@pytest.fixture(autouse=True)
def no_block_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the blocks of other tests in this process."""
    monkeypatch.setattr(wrap, "_left", 0)


def block() -> None:
    register()


def register() -> None:
    raise ValueError("model is already registered")


def raised() -> BaseException:
    with pytest.raises(ValueError) as caught:
        block()
    return caught.value


class Judged:
    def __init__(self) -> None:
        self.steps = StepTracker(Generation(0), None)
        self.it = _Succession(Generation(0), cast(Any, None), self.steps, _Blocks(Facts(None)), "in-process")

    def entry(self, error: BaseException | None, made: int = 0, recovers: bool = False, over: bool = False) -> str:
        self.steps.enter()
        for step in range(made):
            self.steps.begin(step)
            self.steps.end()
        self.steps.recovers = recovers
        self.it.judge(error, block, over)
        return self.it.unfit


def test_the_first_entry_after_steps_that_raises_before_the_recovery() -> None:
    rank = Judged()
    assert rank.entry(raised()) == "", "no step was made"
    assert rank.entry(ValueError("a bug"), made=2) == ""
    unfit = rank.entry(raised())
    assert "ValueError: model is already registered" in unfit
    assert "of test_blocks.py (register()) in front of" in unfit


def test_after_the_recovery_it_takes_two_in_a_row() -> None:
    rank = Judged()
    rank.entry(None, made=1)
    assert rank.entry(raised(), recovers=True) == ""
    assert rank.entry(None, made=1) == ""
    assert [rank.entry(MemoryError()) for _ in "ab"] == ["", ""], "memory is freed, and it is tried again"
    assert rank.entry(raised(), recovers=True) == ""
    assert rank.entry(raised(), recovers=True, over=True), "the third one would end the job"


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), None])
def test_what_says_nothing_of_the_script(error: BaseException | None) -> None:
    rank = Judged()
    rank.entry(None, made=1)
    assert [rank.entry(error), rank.entry(error)] == ["", ""]


class Pausing(NoAgent):
    """An agent that wants a pause."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[RankMessage] = []
        self._hear(Pause(0))

    def _send(self, message: RankMessage) -> None:
        self.sent.append(message)


def test_a_rank_waits_at_the_agreed_boundary_until_its_generation_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, beats = Pausing(), list[int]()
    assert [_Pause(Generation(of), client).is_wanted for of in (0, 1)] == [True, False]
    pause = _Pause(Generation(0), client)
    pause.is_agreed = True

    def end() -> None:
        if len(beats) == 3:
            raise RankShouldRestart

    with pytest.raises(RankShouldRestart):
        pause.wait(lambda: beats.append(1), end)
    assert (client.sent, pause.is_agreed) == ([Paused(0)], False)
    monkeypatch.setattr(wrap, "_PAUSE_LIMIT_S", 0.0)
    pause.wait(lambda: None, end)  # there is no coordinator any more
    assert "training goes on" in caplog.text
    assert not pause.is_wanted, "else each step would wait that long"
