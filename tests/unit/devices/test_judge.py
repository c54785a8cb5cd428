"""Test what the readings of a device mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from checkpointless.devices.judge import FATAL_XIDS, WARNING_XIDS, judged, port_problems
from checkpointless.devices.survey import ProblemKind, Reading

A, B, C = (Reading(index, f"GPU-{name}", "H100", recovery=0) for index, name in enumerate("abc"))
UP, DOWN = ((0, True), (1, True)), ((0, True), (1, False))


@pytest.mark.parametrize(
    ("change", "kind", "is_fatal"),
    [
        ({"is_lost": True}, ProblemKind.LOST, True),
        ({"failure": "Unknown Error"}, ProblemKind.SILENT, True),
        *(({"recovery": action}, ProblemKind.RECOVERY, True) for action in (1, 2, 3, 4, 5, 6, 7)),
        ({"recovery": 8}, ProblemKind.RECOVERY, False),  # of a newer driver
        ({"ecc_uncorrected": 2}, ProblemKind.ECC, False),
        ({"ecc_uncorrected": 2, "recovery": None}, ProblemKind.ECC, False),  # not known before
        ({"remap_failed": True}, ProblemKind.ROW_REMAPPING, True),
        ({"remap_pending": True}, ProblemKind.ROW_REMAPPING, False),
        ({"pcie_width": 8, "pcie_width_max": 16}, ProblemKind.PCIE, False),
        ({"slowdown": 0x40}, ProblemKind.SLOWDOWN, False),
        ({"slowdown": 0x80}, ProblemKind.SLOWDOWN, False),
    ],
)
def test_each_reading_has_its_meaning(change: dict[str, Any], kind: ProblemKind, is_fatal: bool) -> None:
    well, bad = judged([A, replace(B, **change)], before=[A, B])
    assert well.problems == ()
    assert [(problem.kind, problem.is_fatal) for problem in bad.problems] == [(kind, is_fatal)]
    assert (bad.fatal == bad.problems) is is_fatal


def test_a_device_in_order_has_no_problem() -> None:
    well = replace(
        A,
        ecc_uncorrected=0,
        remap_pending=False,
        remap_failed=False,
        links=UP,
        pcie_width=16,
        pcie_width_max=16,
        slowdown=0x05,  # idle, and a limit of power that was set
    )
    assert judged([well, replace(well, index=1, uuid="GPU-b")], before=[well])[0].problems == ()


@pytest.mark.parametrize(
    ("says", "is_fatal"),
    [
        ({"recovery": None}, [False, True, False]),
        ({"recovery": None, "remap_failed": False}, [False] * 3),  # the row was remapped, or will be
        ({"recovery": 0}, [False] * 3),
    ],
)
def test_memory_errors_from_before_the_job_forbid_nothing(says: dict[str, Any], is_fatal: list[bool]) -> None:
    was = replace(A, ecc_uncorrected=2, **says)
    cases = [((), was), ([was], replace(was, ecc_uncorrected=3)), ([was], was)]
    problems = [judged([now], before=before)[0].problems for before, now in cases]
    assert [[each.is_fatal for each in found] for found in problems] == [[each] for each in is_fatal]


def test_a_link_that_went_down_is_fatal_and_one_that_never_was_up_is_not() -> None:
    now = [replace(A, links=DOWN), replace(B, links=UP)]
    went = judged(now, before=[replace(A, links=UP), replace(B, links=UP)])[0].problems
    never = judged(now, before=now)[0].problems
    assert [(each.kind, each.is_fatal) for each in went] == [(ProblemKind.NVLINK, True)]
    assert [(each.kind, each.is_fatal) for each in never] == [(ProblemKind.NVLINK, False)]
    assert judged([replace(A, links=DOWN)], before=[replace(A, links=DOWN)])[0].problems == ()  # nothing to compare
    both = [replace(A, links=DOWN), replace(B, links=DOWN)]
    assert judged(both, before=both)[0].problems == ()  # the board is made so


def test_only_xids_of_the_device_and_not_those_of_programs_count() -> None:
    xids = {("GPU-a", 13), ("GPU-a", 31), ("GPU-a", 63), ("GPU-b", 79)}
    a, b = judged([replace(each, recovery=None) for each in (A, B)], xids=xids)
    assert [(each.kind, each.is_fatal) for each in a.problems] == [(ProblemKind.XID, False)]
    assert [each.is_fatal for each in judged([B], xids=xids)[0].problems] == [False], "the driver wants nothing now"
    assert [each.what for each in b.fatal] == ["Xid 79: GPU has fallen off the bus"]
    assert not FATAL_XIDS.keys() & WARNING_XIDS.keys()


def test_a_device_that_is_missing_is_lost_but_only_if_all_were_asked_about() -> None:
    found = judged([A, C], before=[A, B, C])
    assert [device.uuid for device in found] == ["GPU-a", "GPU-b", "GPU-c"]
    assert [problem.kind for problem in found[1].fatal] == [ProblemKind.LOST]
    assert [device.uuid for device in judged([A], is_complete=False, before=[A, B, C])] == ["GPU-a"]


def test_a_device_that_cannot_say_its_uuid_is_the_one_that_was_there() -> None:
    found = judged([A, Reading(1, failure="GPU is lost", is_lost=True)], before=[A, B])
    assert [(device.index, device.uuid) for device in found] == [(0, "GPU-a"), (1, "GPU-b")]
    assert found[1].fatal


def test_the_ones_behind_a_device_that_is_gone_keep_their_own_problems() -> None:
    found = judged([A, Reading(1, "GPU-c", recovery=1)], before=[A, B, C])
    fatal = {device.uuid: [problem.kind for problem in device.fatal] for device in found}
    assert fatal == {"GPU-a": [], "GPU-b": [ProblemKind.LOST], "GPU-c": [ProblemKind.RECOVERY]}


def test_a_port_that_went_down_is_a_warning() -> None:
    before = [("mlx5_0/1", "ACTIVE"), ("mlx5_1/1", "DOWN"), ("mlx5_2/1", "ACTIVE")]
    found = port_problems([("mlx5_0/1", "DOWN"), ("mlx5_1/1", "DOWN")], before)
    assert [(each.what, each.is_fatal) for each in found] == [
        ("RDMA port mlx5_0/1 is DOWN, and was ACTIVE", False),
        ("RDMA port mlx5_2/1 is gone, and was ACTIVE", False),
    ]
