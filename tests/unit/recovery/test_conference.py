"""Test which names of parts differ from rank to rank, and what of a rank is lost with its process."""

from __future__ import annotations

import pytest

from checkpointless.recovery import manager
from checkpointless.recovery.decide import Decision, Verdict
from checkpointless.recovery.manager import _differing_names, _find_loss
from checkpointless.state.port import DATA
from checkpointless.state.rank_local.state import RankLocalState
from tests.unit.recovery.made_up_state import MadeUpJournal, MadeUpState


def test_a_name_differs_if_a_digest_does_or_if_somebody_lacks_it() -> None:
    digests = [{"same": "1", "other": "1", "lacking": "1"}, {"same": "1", "other": "2"}]
    assert _differing_names(digests) == ["lacking", "other"]
    assert _differing_names(digests[:1]) == []
    assert _differing_names([]) == []


def test_nothing_is_lost_at_the_start_where_nobody_is_refilled() -> None:
    assert _find_loss(MadeUpJournal(MadeUpState(0)), None, RankLocalState(0), Decision(Verdict.RESUME, 0), 0) == ""


def test_only_data_that_differed_is_lost_with_its_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [{f"{DATA} (loaders)": "1", "a callback": "1"}, None, {f"{DATA} (loaders)": "2", "a callback": "2"}]
    monkeypatch.setattr(manager, "all_gather_json", lambda mine: answers)
    monkeypatch.setattr(manager.dist, "get_rank", lambda: 1)
    decision = Decision(Verdict.RESUME, 0, refills={1: (0, 2)}, parts={1: (((0, 1, 2), (0, 2)),)})
    reason = _find_loss(MadeUpJournal(MadeUpState(0)), None, RankLocalState(0), decision, 0)
    assert reason == f"{DATA} (loaders) differed from rank to rank, and that of rank 1 was lost with its process"
    assert "a callback differs from rank to rank: rank [1] gets a peer's" in caplog.text
