"""Test the clock that does not count the pauses of its own process."""

from checkpointless.system.awake_clock import AwakeClock


def test_a_clock_does_not_count_its_own_pauses() -> None:
    times = iter([0.0, 0.1, 0.2, 7.2, 7.3, 7.2])
    clock = AwakeClock(0.5, lambda: next(times))
    assert [round(clock(), 3) for _ in range(5)] == [0.1, 0.2, 0.7, 0.8, 0.8]
