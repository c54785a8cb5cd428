"""Test looks at devices through a module that plays NVML, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from checkpointless.devices import health
from checkpointless.devices.health import NO_DRIVER, ProblemKind, look
from checkpointless.devices.ports import read_ports
from checkpointless.devices.xids import XidCollector

pytestmark = pytest.mark.slow

FAKE = Path(__file__).parents[2] / "fake_nvml"
H100 = {"name": "NVIDIA H100", "recovery": 0, "links": [1, 1], "rows": [0, 0], "ecc": 0, "lanes": [16, 16]}
PATIENCE_S = 60.0  # a machine may be busy


class Nvml:
    """What the module that plays NVML says."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def says(self, *devices: dict[str, Any], **more: Any) -> None:
        rows = [{**H100, "uuid": f"GPU-{n}", "bus_id": f"0000:{n}:00.0", **row} for n, row in enumerate(devices)]
        self._path.write_text(json.dumps({"devices": rows, **more}))

    def has_no_driver(self) -> None:
        self._path.write_text("{}")


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvml:
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "nvml.json"))
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    return Nvml(tmp_path / "nvml.json")


def test_a_look_says_what_there_is_and_what_is_wrong(nvml: Nvml) -> None:
    nvml.says({}, {"lost": True}, {"recovery": 2, "mig": ["MIG-x", "MIG-y"]}, {"lanes": [8, 16]})
    found = look(PATIENCE_S)
    assert (found.error, found.driver_version, found.cuda_driver_version) == ("", "570.86.15", "12.8")
    assert [device.index for device in found.devices] == [0, 1, 2, 3]
    assert str(found.devices[0]) == "GPU 0 (NVIDIA H100, GPU-0, 0000:0:00.0)"
    assert [[(each.kind, each.is_fatal) for each in device.problems] for device in found.devices] == [
        [],
        [(ProblemKind.LOST, True)],
        [(ProblemKind.RECOVERY, True)],
        [(ProblemKind.PCIE, False)],
    ]
    assert found.devices[2].mig_uuids == ("MIG-x", "MIG-y")


def test_without_a_driver_there_is_no_problem(nvml: Nvml) -> None:
    nvml.has_no_driver()
    found = look(PATIENCE_S)
    assert (found.error, found.devices) == (NO_DRIVER, ())


@pytest.mark.parametrize("question", ["handle", "name"])
def test_a_device_that_hangs_is_the_one_that_was_asked_about(nvml: Nvml, question: str) -> None:
    nvml.says({}, {}, {})
    before = look(PATIENCE_S)
    nvml.says({}, {"hang": question}, {})
    began_s = time.monotonic()
    found = look(3.0, start_s=PATIENCE_S, before=before)
    assert time.monotonic() - began_s < 3 + PATIENCE_S
    assert found.error == "NVML did not answer within 3 s"
    assert [(device.uuid, [each.kind for each in device.fatal]) for device in found.devices] == [
        ("GPU-0", []),
        ("GPU-1", [ProblemKind.SILENT]),
    ]


def test_devices_that_are_not_for_this_process_are_left_out(nvml: Nvml) -> None:
    nvml.says({"forbidden": True}, {}, {"forbidden": True}, {"recovery": 1})
    found = look(PATIENCE_S)
    assert found.error == ""
    assert [(device.index, bool(device.fatal)) for device in found.devices] == [(1, False), (3, True)]


def test_the_time_limit_is_that_of_one_device(nvml: Nvml) -> None:
    nvml.says(*[{"slow": 1.0}] * 4)
    found = look(3.0, start_s=PATIENCE_S)
    assert found.error == ""
    assert [device.fatal for device in found.devices] == [()] * 4


def test_a_network_port_whose_file_hangs_blames_no_device(nvml: Nvml, tmp_path: Path) -> None:
    folder = tmp_path / "ib"
    (folder / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    state = folder / "mlx5_0" / "ports" / "1" / "state"
    state.write_text("4: ACTIVE\n")
    nvml.says({}, ports=str(folder))
    before = look(PATIENCE_S)
    assert before.ports == (("mlx5_0/1", "ACTIVE"),)
    state.write_text("1: DOWN\n")
    assert [each.is_fatal for each in look(PATIENCE_S, before=before).network] == [False]
    state.unlink()
    os.mkfifo(state)
    found = look(2.0, start_s=PATIENCE_S, before=before)
    assert (found.error, found.network, found.ports) == ("", (), ())
    assert [device.problems for device in found.devices] == [()]


def test_the_device_in_question_is_asked_about_before_one_that_hangs(nvml: Nvml) -> None:
    nvml.says({"hang": "handle"}, {"recovery": 1})
    found = look(3.0, start_s=PATIENCE_S, first=1)
    kinds = {device.index: [each.kind for each in device.fatal] for device in found.devices}
    assert kinds == {1: [ProblemKind.RECOVERY], 0: [ProblemKind.SILENT]}


def test_if_nvml_does_not_begin_every_device_that_was_there_is_bad(nvml: Nvml) -> None:
    nvml.says({}, {})
    before = look(PATIENCE_S)
    nvml.says({}, {}, hang="init")
    found = look(1.0, start_s=PATIENCE_S, before=before)
    assert [[each.kind for each in device.fatal] for device in found.devices] == [[ProblemKind.SILENT]] * 2
    assert look(1.0, start_s=PATIENCE_S).devices == ()


def test_a_process_that_does_not_come_to_ask_says_nothing_of_devices(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.says({}, {})
    before = look(PATIENCE_S)
    assert look(PATIENCE_S, start_s=0.0, before=before).devices == ()
    monkeypatch.setattr(health.sys, "executable", "/bin/false")
    found = look(PATIENCE_S, before=before)
    assert (found.devices, found.error) == ((), "the process that asks NVML ended without an answer")


def test_xids_are_collected_as_they_come(nvml: Nvml) -> None:
    nvml.says({}, {})
    collector = XidCollector()
    try:
        assert collector.found() == frozenset()
        nvml.says({}, {}, xids=[["GPU-1", 79], ["GPU-0", 13]])
        deadline_s = time.monotonic() + PATIENCE_S
        while len(collector.found()) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert collector.found() == {("GPU-1", 79), ("GPU-0", 13)}
        found = look(PATIENCE_S, xids=collector.found)
        assert [[each.kind for each in device.problems] for device in found.devices] == [[], [ProblemKind.XID]]
    finally:
        collector.close()


def test_a_process_that_waits_for_xids_and_has_ended_is_started_again(nvml: Nvml) -> None:
    nvml.says({}, xids=[["GPU-0", 79]])
    collector = XidCollector()
    try:
        collector._process.kill()
        deadline_s = time.monotonic() + PATIENCE_S
        while not collector.found():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
    finally:
        collector.close()


def test_what_something_else_prints_in_the_process_voids_no_look(nvml: Nvml) -> None:
    nvml.says({"recovery": 1}, prints="a deprecation")
    found = look(PATIENCE_S)
    assert (found.error, [bool(device.fatal) for device in found.devices]) == ("", [True])


def test_an_xid_is_told_once_however_often_it_comes(nvml: Nvml) -> None:
    nvml.says({}, {}, xids=[*[["GPU-0", 13]] * 100, ["GPU-1", 79]])
    command = [sys.executable, "-m", "checkpointless.devices.nvml_process", "xids"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    assert told == [{"begun": True}, {"xid": 13, "uuid": "GPU-0"}, {"xid": 79, "uuid": "GPU-1"}]


def test_the_process_ends_with_its_parent_even_while_nvml_hangs(nvml: Nvml) -> None:
    nvml.says({"hang": "handle"})
    command = [sys.executable, "-m", "checkpointless.devices.nvml_process", "look"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        while b"asking" not in process.stdout.readline():
            assert process.poll() is None
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def test_ports_are_read_as_the_kernel_shows_them(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        (tmp_path / name / "ports" / "1").mkdir(parents=True)
        (tmp_path / name / "ports" / "1" / "state").write_text(state)
    assert read_ports(tmp_path) == (("mlx5_0/1", "ACTIVE"), ("mlx5_1/1", "DOWN"))
    assert read_ports(tmp_path / "none") == ()
