"""Test when a fault is due, and that it is caused no more often than asked for."""

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from checkpointless.faults import inject, ledger
from checkpointless.faults.inject import FaultInjector, InjectedFault, _flip_a_bit
from checkpointless.faults.ledger import FaultLedger, fired, not_fired
from checkpointless.faults.spec import FaultKind, FaultPhase, FaultSpecError, parse
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, read_events
from checkpointless.system.environment import FAULTS_ENV, RUN_DIR_ENV


def injector(run_dir: Path | None, *texts: str, rank: int = 2) -> FaultInjector:
    return FaultInjector([parse(text) for text in texts], rank, FaultLedger(run_dir))


@pytest.fixture(params=["on disk", "in memory"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path | None:
    """Return where claims are kept."""
    monkeypatch.setattr(ledger, "_in_memory", Counter())
    return tmp_path if request.param == "on disk" else None


def causes(injector: FaultInjector, phase: FaultPhase, step: int, generation: int = 0) -> bool:
    try:
        injector.at(phase, step, generation)
    except InjectedFault:
        return True
    return False


def test_a_fault_comes_in_its_phase_step_and_rank_only(tmp_path: Path) -> None:
    text = "exception@backward:rank=2,step=7"
    assert not causes(injector(tmp_path, text, rank=1), FaultPhase.BACKWARD, 7)
    mine = injector(tmp_path, text)
    moments = [(FaultPhase.FORWARD, 7), (FaultPhase.BACKWARD, 6), (FaultPhase.BACKWARD, 7)]
    assert [causes(mine, *each) for each in moments] == [False, False, True]


def test_a_step_made_again_does_not_fail_again(run_dir: Path | None) -> None:
    text = "exception@data:rank=2,step=3,times=2"
    assert [causes(injector(run_dir, text), FaultPhase.DATA, 3, each) for each in range(3)] == [True, True, False]


def test_two_equal_faults_are_two_faults(tmp_path: Path) -> None:
    text = "exception@data:rank=2,step=3"
    both = injector(tmp_path, text, text)
    assert [causes(both, FaultPhase.DATA, 3) for _ in range(3)] == [True, True, False]
    assert fired(tmp_path) == {text: 2}


def test_set_up_phases_cause_nothing_in_the_first_generation(tmp_path: Path) -> None:
    mine = injector(tmp_path, "exception@recovery:rank=2,step=0", "exception@init:rank=2,step=6")
    assert [causes(mine, FaultPhase.RECOVERY, 0, each) for each in (0, 1)] == [False, True]
    assert [causes(mine, FaultPhase.INIT, 6, each) for each in (0, 2)] == [False, True]


def test_chance_is_reproducible_and_its_own() -> None:
    texts = [f"exception@forward:prob=0.3,times=1000,seed={seed}" for seed in (5, 6)]
    before = random.getstate()
    a, again, other = (
        [injector(None, text)._drawn(0, parse(text), step, 0) for step in range(1, 400)]
        for text in (texts[0], texts[0], texts[1])
    )
    assert random.getstate() == before
    assert a == again != other
    assert 80 < sum(a) < 160


def test_an_injected_fault_is_written_down_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path))
    monkeypatch.setenv(FAULTS_ENV, json.dumps(["exception@optimizer:rank=1,step=4"]))
    mine: Any = FaultInjector.from_environment(1)
    assert causes(mine, FaultPhase.OPTIMIZER, 4)
    assert "fault_injected" in (tmp_path / EVENTS_FILE).read_text(), "and not only on the way there"
    (event,) = read_events(tmp_path)
    assert (event.stage, event.edge, event.rank, event.generation) == (EventName.FAULT_INJECTED, "point", 1, 0)
    assert event.fields["spec"] == "exception@optimizer:rank=1,step=4"
    assert fired(tmp_path) == {"exception@optimizer:rank=1,step=4": 1}


@pytest.mark.parametrize("value", [None, "", "[]"])
def test_nothing_is_injected_unless_asked_for(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAULTS_ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(FAULTS_ENV, value)
    assert FaultInjector.from_environment(0) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory of the host runs out where there is no CUDA")
def test_memory_that_runs_out_is_torchs_own_error_and_nothing_is_kept(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        injector(tmp_path, "oom@backward:rank=2,step=3").at(FaultPhase.BACKWARD, 3, 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.empty(1 << 20)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dataloader@data:rank=2,step=3", "no workers"),
        ("dataloader@data:rank=2,step=3,how=kill", "no workers"),
        pytest.param(
            "cuda@data:rank=2,step=3",
            "CUDA is not available",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA"),
        ),
        ("bitflip@data:rank=2,step=3", "where this rank's state is"),
        ("node@data:rank=2,step=3", "a job of several nodes"),
    ],
)
def test_what_cannot_be_caused_here_does_not_count_as_caused(text: str, says: str, tmp_path: Path) -> None:
    mine = injector(tmp_path, text)
    mine.batches = lambda: None
    with pytest.raises(FaultSpecError, match=says):
        mine.at(FaultPhase.DATA, 3, 0)
    assert fired(tmp_path) == {}
    assert not_fired([parse(text)], tmp_path) == (text,)


def test_a_death_that_is_interrupted_has_not_happened(
    run_dir: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank's fault raises in this rank's main thread, between any two of its instructions."""
    text = "sigkill@data:rank=2,step=3,times=2"
    assert FaultLedger(run_dir).claim(0, parse(text))
    monkeypatch.setitem(inject._ENDS, FaultKind.SIGKILL, Mock(side_effect=InterruptedError))
    mine = injector(run_dir, text)
    with pytest.raises(InterruptedError):
        mine.at(FaultPhase.DATA, 3, 0)
    assert not mine.ledger.is_spent(0, parse(text))
    assert mine.ledger.claim(0, parse(text))


def test_a_claim_is_whole_or_not_there(tmp_path: Path) -> None:
    link = os.link

    def interrupted(*args: Path) -> None:
        link(*args)
        raise InterruptedError

    text = "sigkill@data:rank=2,step=3"
    with patch.object(os, "link", interrupted), pytest.raises(InterruptedError):
        FaultLedger(tmp_path).claim(0, parse(text))
    assert not list(tmp_path.rglob("*0-0*"))
    assert FaultLedger(tmp_path).claim(0, parse(text))


def test_what_did_not_happen_is_counted(tmp_path: Path) -> None:
    twice, never, chance = "slow@data:rank=2,step=3,times=2", "exit@data:rank=0,step=1", "exit@data:prob=0.5"
    specs = [parse(text) for text in (twice, never, chance)]
    claims = FaultLedger(tmp_path)
    for left in ((twice, never), (twice, never), (never,)):
        assert not_fired(specs, tmp_path) == left
        claims.claim(0, specs[0])


def test_a_bit_is_flipped_in_what_the_phase_works_on_or_else_in_the_state(tmp_path: Path) -> None:
    mine = injector(tmp_path, "bitflip@transfer:rank=2,step=3", "bitflip@data:rank=2,step=3")
    state, bucket = torch.zeros(4), torch.zeros(4)
    mine.target = lambda: state
    mine.at(FaultPhase.TRANSFER, 3, 1, lambda: bucket)
    assert (state.any().item(), bucket.any().item()) == (False, True)
    mine.at(FaultPhase.DATA, 3, 1)
    assert state.any()


# --- Test that a flipped bit is one bit, in any tensor ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)])
def test_one_bit_is_flipped_and_flipped_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    _flip_a_bit(tensor)
    (changed,) = [byte for byte in tensor.reshape(-1).view(torch.uint8).tolist() if byte]
    assert changed == 1
    _flip_a_bit(tensor)
    assert not tensor.reshape(-1).view(torch.uint8).any()
