"""Test that a seed always draws the same faults, which are possible and say what must come of them."""

from pathlib import Path

import pytest

from checkpointless import cli
from checkpointless.faults.spec import DEADLY, SETUP_PHASES, FaultKind, parse, parse_all
from checkpointless.observability.report.incidents import IncidentSummary
from checkpointless.observability.report.incidents import Outcome as Ending
from checkpointless.observability.telemetry.event_names import Rung
from checkpointless.system.layout import Layout
from checkpointless.testing.chaos import _NEMO, _SCOPES, _Case, _draw, _Outcome, _outcome_of, _Scope
from checkpointless.testing.demo.trainers import TRAINERS, Trainer

MANY = [(seed, number, seed % 2 == 1) for seed in range(12) for number in range(40)]
IN_EVERY_SCOPE = pytest.mark.parametrize("scope", [_SCOPES[name] for name in TRAINERS], ids=TRAINERS)


def cases(scope: _Scope = _NEMO) -> list[_Case]:
    return [_draw(seed, number, overlap=overlap, scope=scope) for seed, number, overlap in MANY]


# ---- layouts


@pytest.mark.parametrize(
    ("layout", "rank", "group"),
    [  # Megatron-core's own groups were seen to be these
        (Layout.on_one_node(4), 1, {1, 3}),
        (Layout.on_one_node(4, tensor=2), 0, {0, 2}),
        (Layout.on_one_node(4, pipeline=2), 3, {2, 3}),
        (Layout.on_one_node(6, instances=3), 4, {0, 2, 4}),
        (Layout.on_one_node(8, tensor=2, pipeline=2), 5, {5, 7}),
    ],
)
def test_who_holds_the_same_shard(layout: Layout, rank: int, group: set[int]) -> None:
    assert layout.replicas(rank) == group


# ---- cases


def test_a_case_is_the_same_whenever_it_is_drawn() -> None:
    assert _draw(3, 17, overlap=True) == _draw(3, 17, overlap=True)
    assert len({case.faults for case in cases()}) > 200
    assert _draw(3, 17) != _draw(4, 17)


@IN_EVERY_SCOPE
def test_every_case_can_happen(scope: _Scope) -> None:
    for case in cases(scope):
        specs = parse_all(case.faults, case.layout.world_size, case.steps)
        assert case.layout.world_size % case.nodes == 0
        several = any(spec.kind in (FaultKind.NODE, FaultKind.PARTITION, FaultKind.STORE) for spec in specs)
        assert several == (case.nodes > 1)
        assert (case.workers > 0) == any(spec.kind is FaultKind.DATALOADER for spec in specs)
        assert all(spec.phase in scope.phases for spec in specs)
        if any(spec.phase in SETUP_PHASES for spec in specs):
            assert specs[0].phase not in SETUP_PHASES


@IN_EVERY_SCOPE
def test_all_outcomes_kinds_and_layouts_are_drawn(scope: _Scope) -> None:
    drawn = cases(scope)
    assert {case.outcome for case in drawn} == set(_Outcome) - (set() if scope.storage else {_Outcome.STORAGE})
    kinds = {parse(text).kind for case in drawn for text in case.faults}
    assert kinds == set(FaultKind) - {FaultKind.CUDA}
    assert {case.layout.text for case in drawn} == {layout.text for layout, _ in scope.layouts}


@IN_EVERY_SCOPE
def test_a_case_that_loses_all_holders_says_which(scope: _Scope) -> None:
    for case in cases(scope):
        assert bool(case.reason) == (case.outcome is _Outcome.REFUSED)
        if case.outcome not in (_Outcome.REFUSED, _Outcome.STORAGE) or case.nodes > 1 or case.checksum:
            continue
        lost = {spec.rank for spec in map(parse, case.faults) if spec.kind in DEADLY}
        assert case.layout.replicas(min(rank for rank in lost if rank is not None)) <= lost
        assert (case.checkpoint_every > 0) == (case.outcome is _Outcome.STORAGE)


@pytest.mark.parametrize(("steps", "most_ranks", "what"), [(5, 8, "6 steps"), (6, 1, "2 ranks")])
def test_what_cannot_be_drawn_is_refused(steps: int, most_ranks: int, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        _draw(0, 0, steps=steps, most_ranks=most_ranks)


def incident(rung: Rung, ending: Ending = Ending.RESUMED) -> IncidentSummary:
    return IncidentSummary("1", 0, "", None, "", 0, None, None, rung=rung, outcome=ending)


@pytest.mark.parametrize(
    ("code", "incidents", "outcome"),
    [
        (0, [], _Outcome.NOTHING),
        (0, [incident(Rung.IN_PROCESS)], _Outcome.IN_PROCESS),
        (0, [incident(Rung.PROCESS, Ending.ESCALATED), incident(Rung.IN_PROCESS)], _Outcome.PROCESS),
        (0, [incident(Rung.NODE)], _Outcome.NODE),
        (0, [incident(Rung.JOB)], _Outcome.STORAGE),
        (0, [incident(Rung.PROCESS, Ending.FAILED)], None),
        (1, [incident(Rung.PROCESS, Ending.FAILED)], _Outcome.REFUSED),
        (1, [], None),
        (-9, [incident(Rung.PROCESS)], None),
    ],
)
def test_what_came_of_a_job(code: int, incidents: list[IncidentSummary], outcome: _Outcome | None) -> None:
    assert _outcome_of(code, incidents) is outcome


# ---- the command line


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("demo --seed 3", "--seed needs --chaos"),
        ("demo --chaos-case 1", "--chaos-case needs --chaos"),
        ("demo --chaos 4 --layout tp=2", "leave --layout out"),
        ("demo --chaos 4 --chaos-case 4", "below 4"),
        ("demo --chaos 4 --steps 3", "at least 6 steps"),
    ],
)
def test_chaos_that_cannot_be_is_refused_in_one_line(
    words: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Trainer, "require", lambda _: None)  # the demo looks first whether there is NeMo
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(words.split())
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    said = capsys.readouterr().err
    assert (code, said.count("\n")) == (2, 1)
    assert what in said
    assert not (tmp_path / "runs").exists()
