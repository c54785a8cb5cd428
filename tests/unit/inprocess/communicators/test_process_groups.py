"""Test what is left of a generation's process groups, and with which settings they are made."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from checkpointless.inprocess.communicators import process_groups
from checkpointless.inprocess.communicators.process_groups import MOST_COUNTS, _CapturedGraphs, _ProcessGroups
from checkpointless.launcher.protocol.messages import FROM_RANK, Answer, encode
from checkpointless.system import nccl
from checkpointless.system.nccl import SETTINGS, apply, problem_of_version
from tests.waiting import wait_until


@pytest.fixture
def groups() -> Iterator[_ProcessGroups]:
    made = _ProcessGroups()
    made.install()
    yield made
    made.destroy()
    made.uninstall()


def make() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_the_name_of_a_group_that_was_being_made_is_free_again(groups: _ProcessGroups) -> None:
    """The interruption comes in ``init_process_group``, after torch has registered the group's name."""
    with patch.object(c10d, "_update_default_pg", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        make()
    assert not dist.is_initialized()
    groups.destroy()
    make()
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0]


def run_loops() -> set[str]:
    found = set()
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            if path.read_text().startswith("pt_gloo_runloop"):
                found.add(path.parent.name)
    return found


@pytest.mark.parametrize("by_the_block", [True, False])
def test_no_destructor_of_a_group_runs_before_it_is_reaped(groups: _ProcessGroups, by_the_block: bool) -> None:
    """C++ may refer to it, too, and would run it with the interpreter's lock, for which gloo's threads may wait."""
    before = run_loops()
    make()
    wait_until(lambda: bool(run_loops() - before))  # a thread names itself
    made = run_loops() - before
    if by_the_block:
        dist.destroy_process_group()
    groups.destroy()
    assert run_loops() >= made
    groups.reap()
    wait_until(lambda: not run_loops() & made)


class FakeNCCL:
    """Stands in for a backend of NCCL's: its abort ends when those of all communicators have begun."""

    def __init__(self, all_begun: threading.Barrier) -> None:
        self._all_begun = all_begun
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1
        self._all_begun.wait(60)


class FakeGroup:
    """Stands in for a group with one backend, for GPUs."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def _get_backend(self, device: torch.device) -> Any:
        if device.type != "cuda":
            raise RuntimeError("no backend for it")
        return self._backend


def abort_all(*backends: Any) -> None:
    pg_map = {FakeGroup(backend): None for backend in backends}
    with patch.object(c10d, "_world", SimpleNamespace(pg_map=pg_map)):
        _ProcessGroups().abort()


def test_communicators_of_one_device_are_aborted_at_the_same_time() -> None:
    together = threading.Barrier(4)
    backends = [FakeNCCL(together) for _ in range(4)]
    # The same backend belongs to a group and to a part of it; torch has wrapped another one to look at it.
    abort_all(*backends[:3], backends[0], SimpleNamespace(wrapped_pg=backends[3]))
    assert [each.aborts for each in backends] == [1] * 4


def test_an_abort_that_fails_keeps_no_other_from_being_aborted() -> None:
    broken, whole = threading.Barrier(2), threading.Barrier(1)
    broken.abort()
    backends = [FakeNCCL(broken), FakeNCCL(whole)]
    with pytest.raises(threading.BrokenBarrierError):
        abort_all(*backends)
    assert [each.aborts for each in backends] == [1, 1]


def test_counts_that_fit_into_no_message_are_left_out_altogether() -> None:
    """A rank whose answer cannot be sent would seem to be mute, and half of the counts accuse the wrong rank."""
    groups = _ProcessGroups()
    for peer in range(MOST_COUNTS):
        groups.messages[f"group 123/{1_000_000 + peer}>{2_000_000 + peer}"] = 10**9
    answer = Answer(1, False, "in step" * 200_000, True, groups.launched())
    assert len(answer.launched) == MOST_COUNTS
    assert FROM_RANK.decode(encode(answer).rstrip()) is not None
    groups.messages["group 123/1>2"] = 1
    assert groups.launched() == {}


def test_after_the_last_block_only_groups_that_it_has_destroyed_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it leaves are torch's, and end as without us."""
    held: list[object] = []
    monkeypatch.setattr(process_groups, "_bury", held.extend)
    groups = _ProcessGroups()
    groups.install()
    make()
    destroyed: Any = dist.new_group([0])
    dist.destroy_process_group(destroyed)
    left = dist.group.WORLD
    groups.uninstall()
    assert held == [destroyed]
    assert left in c10d._world.pg_map
    groups.destroy()


def test_the_debug_level_detail_is_lowered_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    before, made = dist.get_debug_level(), _ProcessGroups()
    try:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        made.install()
        assert dist.get_debug_level() == dist.DebugLevel.INFO
    finally:
        made.uninstall()
        dist.set_debug_level(before)
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL is lowered to INFO" in caplog.text


def test_both_ends_of_a_message_count_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for rank, peer, is_send in ((0, 2, True), (2, 0, False)):
        groups, group = _ProcessGroups(), Mock()
        group.rank.return_value = rank
        monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_names={group: "4"}))
        counted = groups.counting(is_send, lambda *given: given)
        for _ in range(3):
            assert counted(group, [], peer, 7) == (group, [], peer, 7)
        ends.append(dict(groups.messages))
    assert ends == [{"4/0>2": 3}] * 2


def test_the_last_reference_is_never_dropped_by_the_thread_that_reaps() -> None:
    """A destructor may block for as long as a group's timeout."""
    ended_in: list[str] = []

    class Group:
        def __del__(self) -> None:
            ended_in.append(threading.current_thread().name)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # the new thread runs at once
    try:
        buried = [Group() for _ in range(300)]
        process_groups._bury([*buried])
        buried.clear()
        process_groups.process_groups.reap()
        wait_until(lambda: len(ended_in) == 300)
    finally:
        sys.setswitchinterval(interval)
    assert set(ended_in) == {"checkpointless-reaper"}


# --- Graphs are given up beside an abort, but never while they are replayed ---------------------------------------


class Graph:
    """Stands in for ``torch.cuda.CUDAGraph``: it may be reset only while nobody replays it."""

    def __init__(self, room: threading.Event | None = None) -> None:
        self.replays = self.resets = 0
        self.began = threading.Event()
        self._room = room
        self._is_replayed = False

    def capture_end(self) -> None:
        """Do nothing."""

    def replay(self) -> None:
        self._is_replayed = True
        self.began.set()
        if self._room is not None:
            self._room.wait(60)
        self._is_replayed = False
        self.replays += 1

    def reset(self) -> None:
        assert not self._is_replayed, "it would be freed under the launch"
        self.resets += 1


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> _CapturedGraphs:
    made = _CapturedGraphs()
    monkeypatch.setattr(Graph, "capture_end", made.noting(Graph.capture_end))
    monkeypatch.setattr(Graph, "replay", made.replaying(Graph.replay))
    return made


def test_a_graph_is_not_reset_while_it_is_replayed(graphs: _CapturedGraphs) -> None:
    aborted = threading.Event()  # the kernels before it, whose end makes room in the queue
    graph = Graph(aborted)
    graph.capture_end()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(graph.replay)
        assert graph.began.wait(60)
        giving_up = pool.submit(graphs.give_up)
        assert not wait([giving_up], 0.2).done
        assert graph.resets == 0
        aborted.set()
    assert (graph.replays, graph.resets) == (1, 1)


def test_a_graph_whose_capture_ends_after_the_abort_began_is_given_up(graphs: _CapturedGraphs) -> None:
    late, next_generations = Graph(), Graph()
    graphs.give_up()
    late.capture_end()
    assert late.resets == 1
    with pytest.raises(process_groups._GraphGivenUpError):
        late.replay()
    graphs.begin_generation()
    next_generations.capture_end()
    next_generations.replay()
    assert (next_generations.replays, next_generations.resets) == (1, 0)


# --- Which variables of torch's and NCCL's a rank is given, and whose value counts --------------------------------

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def test_what_nobody_has_set_is_set(caplog: pytest.LogCaptureFixture) -> None:
    environ: dict[str, str] = {}
    assert apply(environ) == ()
    assert environ == {name: setting.value for name, setting in SETTINGS.items()}
    assert (apply(environ), caplog.messages) == ((), [])


@pytest.mark.parametrize("name", SETTINGS)
def test_a_users_own_value_counts_and_is_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    environ = {name: "3"}
    assert (apply(environ), environ[name]) == ((name,), "3")
    assert caplog.messages == [f"{name}=3 is kept: {SETTINGS[name].otherwise}"]


@pytest.mark.parametrize(("launcher", "kept"), [({"TORCHELASTIC_RUN_ID": "a"}, "0"), ({}, "1")])
def test_what_torchrun_gives_to_every_rank_is_no_users_wish(launcher: dict[str, str], kept: str) -> None:
    environ = {HANDLING: "1", **launcher}
    apply(environ)
    assert environ[HANDLING] == kept


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set none of the variables, and have those that are set meanwhile removed again."""
    for name in SETTINGS:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("there", [True, False])
def test_groups_are_made_with_these_settings_where_there_is_nccl(
    there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl, "in_force", lambda: (2, 21, 5))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: there)
    groups = _ProcessGroups()
    groups.install()
    groups.uninstall()
    assert [os.environ.get(name) for name in SETTINGS] == (
        [setting.value for setting in SETTINGS.values()] if there else [None] * len(SETTINGS)
    )
    assert [text.startswith("NCCL 2.21.5: ") for text in caplog.messages] == [True] * there


@pytest.mark.parametrize(
    ("version", "is_fine"), [((2, 26, 2), True), ((2, 30), True), ((2, 26, 1), False), ((2, 9), False)]
)
def test_a_version_whose_aborts_may_deadlock_is_named(version: tuple[int, ...], is_fine: bool) -> None:
    assert (problem_of_version(version) is None) is is_fine


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize(
    ("version", "users", "said"),
    [("2.13.0", None, 0), ("2.15.0+cu132", None, 1), ("3.0", None, 1), ("2.15.0", "0", 0)],
)
def test_nccl_means_what_it_meant_before_torch_2_15(
    version: str, users: str | None, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", process_groups.__name__)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    if users is not None:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", users)
    process_groups._prepare_nccl()
    assert os.environ["TORCH_DIST_USE_NCCL2"] == "0"
    assert [text.startswith("nccl means torch's former") for text in caplog.messages] == [True] * said
