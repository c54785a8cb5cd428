"""Test how much memory a re-entry takes, and what is said where it does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.doctor import memory
from checkpointless.doctor.findings import Finding, Severity
from checkpointless.doctor.memory import State, judge

GB = 10**9
EIGHT = State.of(8e9, 8)


@given(st.integers(1, 10**6), st.integers(1, 512))
def test_the_sizes_are_those_of_the_formula(thousands: int, shards: int) -> None:
    count = 12_000 * thousands * shards  # everything divides
    state = State.of(count, shards)
    assert state.steady == 6 * count + 12 * count // shards
    assert state.peak == max(8 * count + 12 * count // shards, 6 * count + 16 * count // shards)
    assert state.peak_offloaded == max(8 * count, 6 * count + 12 * count // shards)
    assert state.held == 12 * count // shards


def judged(state: State, device: float | None, offload: bool = False, host: float = 1e12) -> list[Finding]:
    bytes_ = None if device is None else int(device)
    return judge(state, device_bytes=bytes_, host_bytes=int(host), ranks=8, offload=offload, source="here")


def test_what_fits_is_right() -> None:
    (found,) = judged(EIGHT, 140 * GB)
    assert (found.severity, found.source) == (Severity.OK, "here")
    assert found.seen == (
        "the state takes 60 GB per rank, and 76 GB at the peak of a re-entry; a device has 140 GB"
    )
    (unknown,) = judged(EIGHT, None)
    assert unknown.severity is Severity.OK


def test_a_peak_that_does_not_fit_can_be_offloaded() -> None:
    device, host = judged(EIGHT, 70 * GB)
    assert device.severity is Severity.WARNING
    assert "ranks run out of memory in a recovery" in device.seen
    assert device.todo == "set enable_offload, which keeps 12 GB per rank in host memory meanwhile"
    assert host.severity is Severity.OK
    _, small = judged(EIGHT, 70 * GB, host=80 * GB)
    assert small.severity is Severity.ADVICE
    assert "96 GB of the host for 8 ranks; 80 GB are free" in small.seen


def test_with_offload_the_hosts_memory_counts() -> None:
    device, host = judged(EIGHT, 70 * GB, offload=True)
    assert (device.severity, host.severity) == (Severity.OK, Severity.OK)
    assert judged(EIGHT, 70 * GB, offload=True, host=GB)[1].severity is Severity.WARNING


def test_a_state_that_does_not_fit_at_all_is_an_error() -> None:
    (found,) = judged(EIGHT, 40 * GB)
    assert (found.severity, "not even training fits" in found.seen) == (Severity.ERROR, True)


def test_what_the_host_has_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (memory.host_memory() or 0) > 2**20
    monkeypatch.setattr(memory, "_SMI", ("printf", "81559\\n40960\\n"))
    assert memory.device_memory() == 40960 * 2**20
    monkeypatch.setattr(memory, "_SMI", ("no-such-program",))
    assert memory.device_memory() is None
