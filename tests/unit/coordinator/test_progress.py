"""Test the nodes' reports on how far their ranks have come."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from checkpointless.launcher.coordinator.job import _ProgressReports
from checkpointless.launcher.protocol.messages import Progress


@given(st.lists(st.tuples(st.integers(0, 4), st.none() | st.tuples(st.integers(-1, 9), st.integers(-1, 9)))))
def test_reports_agree_with_brute_force(said: Sequence[tuple[int, tuple[int, int] | None]]) -> None:
    reports, last = _ProgressReports(5), dict[int, tuple[int, int]]()
    for node, steps in said:
        if steps is None:
            reports.drop(node)
            last.pop(node, None)
        else:
            reports.put(node, Progress(*steps, 10, 0))
            last[node] = steps
        assert reports.are_complete == (len(last) == 5)
        if last:
            assert reports.oldest == min(oldest for oldest, _ in last.values())
            assert reports.newest == max(newest for _, newest in last.values())
