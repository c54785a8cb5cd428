"""Saves after a fault: what Megatron's writers report is for the save that asks for it."""

from __future__ import annotations

import queue

import pytest

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
