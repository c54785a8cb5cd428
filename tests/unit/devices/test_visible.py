"""Test which device a rank uses."""

from __future__ import annotations

import pytest

from checkpointless.devices.survey import Device
from checkpointless.devices.visible import PCI_BUS_ID, device_of

SAME = [
    Device(0, "GPU-aa11", "H100", "", (), ("MIG-1", "MIG-2")),
    Device(1, "GPU-aa22", "H100", ""),
    Device(2, "GPU-bb33", "H100", ""),
]
MIXED = [Device(0, "GPU-a", "T4", ""), Device(1, "GPU-b", "H100", "")]


def test_numbers_count_the_devices_that_may_be_used() -> None:
    others = [Device(number, f"GPU-{number}", "H100", "") for number in (5, 2, 7)]
    used = [device_of(rank, others, None, None) for rank in range(4)]
    assert [device and device.index for device in used] == [2, 5, 7, None]


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, [0, 1, 2, None]),
        ("2,0", [2, 0, None]),
        (" 2 , 0 ", [2, 0, None]),
        ("GPU-bb33,GPU-aa2", [2, 1, None]),
        ("GPU-aa,1", [None, None]),  # two devices begin so
        ("0,7,1", [0, None, None]),  # the list ends at the first that does not exist
        ("0,-1,1", [0, None, None]),
        ("", [None]),
        ("MIG-2,MIG-1", [0, 0, None]),
        ("MIG-GPU-bb33/1/0", [2]),
        ("MIG-3", [None]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible: str | None, found: list[int | None]) -> None:
    devices = [device_of(local, SAME, visible, None) for local in range(len(found))]
    assert [device.index if device is not None else None for device in devices] == found


def test_numbers_tell_nothing_where_cuda_may_count_otherwise() -> None:
    assert device_of(0, MIXED, None, None) is None
    assert device_of(0, MIXED, "1", None) is None
    assert device_of(0, MIXED, "GPU-b", None) == MIXED[1]
    assert device_of(0, MIXED, "1", PCI_BUS_ID) == MIXED[1]
