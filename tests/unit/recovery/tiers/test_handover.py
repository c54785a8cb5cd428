"""Test what a process hands to its successor: it comes back whole, is private, and is written only if it fits."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.launcher.protocol.channel import LOOPBACK
from checkpointless.observability.telemetry.wording import size
from checkpointless.replication import handover
from checkpointless.replication.handover import Snapshot, clear, hand_over, offer, take_over
from checkpointless.state.held_state import HeldState
from checkpointless.state.port import SnapshotPoint, StepSnapshot
from checkpointless.state.rank_local.state import RankLocalState
from checkpointless.state.rng import RngStates
from checkpointless.system.environment import HANDOVER_ENV, SOURCE_ENV
from checkpointless.transfer.tensor_entry import Key

WEIGHT, BUFFER = ("model", 0, "weight"), ("model", 0, "running")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv(HANDOVER_ENV, str(tmp_path))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    yield tmp_path
    clear()


def held(torn: bool = False) -> HeldState:
    buffer = torch.arange(3.0)
    moment = StepSnapshot({"step": 7, "groups": [[{"lr": 0.1, "exp": torch.full((5000,), 2.0)}]]}, {BUFFER: buffer})
    tensors: dict[Key, torch.Tensor] = {
        WEIGHT: torch.randn(4, 3, dtype=torch.bfloat16),
        ("model", 0, "strided"): torch.randn(7, 5).t(),
        ("model", 0, "empty"): torch.empty(0, 3),
        BUFFER: buffer,
        ("optimizer", 0): torch.tensor(3.0),
    }
    moments = {SnapshotPoint.COMMITTED: moment, SnapshotPoint.CHECKED: moment}
    buffers: Any = {(7, SnapshotPoint.COMMITTED): {BUFFER: buffer}}
    return HeldState(
        CommitState(7, ready=False, torn=torn), tensors, moments, {(0, 1): "abc"}, buffers=buffers, fit=2
    )


def has_the_tensors(found: Any, state: HeldState) -> bool:
    return all(torch.equal(found.held.tensors[key], each) for key, each in state.tensors.items())


def test_it_comes_back_as_it_was(folder: Path) -> None:
    own, state = RankLocalState(0), held()
    own.streams.keep(7, RngStates.capture(0.25, own={"norms": [1.0, 2.0]}))
    drawn = torch.rand(1)
    estate = Snapshot(state, 2, {1: {"epoch": 3}}, ((4, 7, 1, True),))
    nbytes, problem = hand_over(estate, own, 7)
    assert (nbytes > 20_000, problem) == (True, "")
    (root,) = folder.iterdir()
    (part,) = root.iterdir()
    assert (root.stat().st_mode & 0o777, part.stat().st_mode & 0o777) == (0o700, 0o600)
    successor = RankLocalState(0)
    found: Any = take_over(successor)
    assert (found.held.commit, found.held.fit, found.held.digests) == (state.commit, 2, state.digests)
    assert list(found.held.tensors) == list(state.tensors)
    assert has_the_tensors(found, state)
    assert set(found.held.moments) == set(state.moments)
    there = found.held.moments[SnapshotPoint.CHECKED]
    assert torch.equal(there.objects["groups"][0][0]["exp"], torch.full((5000,), 2.0))
    assert torch.equal(there.buffers[BUFFER], torch.arange(3.0))
    assert set(found.held.buffers) == {(7, SnapshotPoint.COMMITTED)}
    assert found.saves == ((4, 7, 1, False),), "the writers of saves have ended"
    assert (found.begun, found.finished) == (2, {1: {"epoch": 3}})
    assert successor.streams.at(7)[SnapshotPoint.COMMITTED].own == {"norms": [1.0, 2.0]}
    assert successor.streams.restore(7, SnapshotPoint.COMMITTED)
    assert torch.equal(torch.rand(1), drawn)
    clear()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("at", ["middle", "end"])
def test_what_is_damaged_is_not_used(folder: Path, at: str, caplog: pytest.LogCaptureFixture) -> None:
    hand_over(Snapshot(held()), RankLocalState(0), 7)
    (part,) = folder.glob("rank-*/*")
    content = bytearray(part.read_bytes())
    content[len(content) // 2 if at == "middle" else -1] ^= 1
    part.write_bytes(content)
    assert take_over(RankLocalState(0)) is None
    assert "handed over cannot be used" in caplog.text


@pytest.mark.parametrize("where", ["folder", "container"])
def test_nothing_is_written_without_room(folder: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "folder":
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=4, f_frsize=4096))
    else:
        group = folder.parent / "group"
        group.mkdir()
        for name, value in {"max": "100000", "current": "90000", "stat": "anon 1\ninactive_file 9000"}.items():
            (group / f"memory.{name}").write_text(f"{value}\n")
        monkeypatch.setattr(handover, "_CONTROL_GROUP", group)
    nbytes, problem = hand_over(Snapshot(held()), RankLocalState(0), 7)
    assert (nbytes, list(folder.iterdir())) == (0, [])
    assert "are needed in" in problem
    assert problem.endswith(f"{size(16384 if where == 'folder' else 19000)} are free")


class Trained:
    step = 7

    def finish_update(self) -> None:
        self.step += 1

    def tensors(self) -> dict[Key, torch.Tensor]:
        return {WEIGHT: torch.full((2,), float(self.step))}

    def snapshots(self, step: int) -> dict[SnapshotPoint, StepSnapshot]:
        return {SnapshotPoint.COMMITTED: StepSnapshot({"step": step})}


@pytest.mark.parametrize("high_water", [7, 8])
def test_an_update_that_another_rank_has_made_is_made_first(folder: Path, high_water: int) -> None:
    journal: Any = Trained()
    journal.state = journal
    commit = CommitState(7, ready=True, torn=False)
    state = HeldState(commit, journal.tensors(), journal.snapshots(7), journal=journal)
    assert hand_over(Snapshot(state), RankLocalState(0), high_water)[1] == ""
    found: Any = take_over(RankLocalState(0))
    assert found.held.commit == CommitState(high_water, ready=False, torn=False)
    assert found.held.tensors[WEIGHT].tolist() == [high_water, high_water]
    assert found.held.moments[SnapshotPoint.COMMITTED].objects == {"step": high_water}


# --- over the network ---------------------------------------------------------------------------------------------


def fetch_from(source: str, monkeypatch: pytest.MonkeyPatch) -> Snapshot | None:
    monkeypatch.setenv(SOURCE_ENV, source)
    return take_over(RankLocalState(0))


def test_a_successor_on_another_node_fetches_it_as_often_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    state = held()
    source, problem = offer(Snapshot(state), RankLocalState(0), 7, LOOPBACK)
    assert (source.split()[0], problem) == (LOOPBACK, "")
    for _ in range(2):
        assert has_the_tensors(fetch_from(source, monkeypatch), state)
    clear()
    assert fetch_from(source, monkeypatch) is None


def test_only_who_knows_the_secret_gets_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, _ = offer(Snapshot(held()), RankLocalState(0), 7, LOOPBACK)
    address, port, secret = source.split()
    assert fetch_from(f"{address} {port} {'0' * len(secret)}", monkeypatch) is None
    assert "offers cannot be used" in caplog.text
    assert fetch_from(source, monkeypatch) is not None, "the stranger is shown out"


def test_who_says_nothing_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = offer(Snapshot(held()), RankLocalState(0), 7, LOOPBACK)
    address, port, _ = source.split()
    monkeypatch.setattr(handover, "_TRANSFER_TIMEOUT_S", 2.0)
    monkeypatch.setattr(handover, "_FETCH_LIMIT_S", 0.0)
    with socket.create_connection((address, int(port))):
        assert fetch_from(source, monkeypatch) is not None
