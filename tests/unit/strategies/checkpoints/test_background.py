"""Test whose the reports of the writers of background saves are after a fault."""

from __future__ import annotations

import queue

import pytest

pytestmark = pytest.mark.nemo


def test_an_answer_that_nobody_has_read_is_not_taken_for_the_next() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from checkpointless.integrations.lightning.checkpoints.saves import _reset_reports

    before = filesystem_async._get_write_results_queue()
    before.put("of a save that was interrupted")
    before._tls.connection.send((before._id, "empty", (), {}))  # it is interrupted before the answer comes
    _reset_reports()
    after = filesystem_async._get_write_results_queue()
    assert after.empty() is True
    assert before.empty() is False, "whoever goes on with that save gets its report"
    after.put("of the next save")
    assert after.get_nowait() == "of the next save"
    assert before.get_nowait() == "of a save that was interrupted"
    for reports in (before, after):
        with pytest.raises(queue.Empty):
            reports.get_nowait()


def test_reports_whose_process_is_gone_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from checkpointless.integrations.lightning.checkpoints.saves import _report_separately

    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    reports = filesystem_async._get_write_results_queue()
    reports._manager._process.kill()
    reports._manager._process.join()
    _report_separately()
    again = filesystem_async._get_write_results_queue()
    again.put("of the next save")
    assert again.get_nowait() == "of the next save"
