"""Test what is said of devices, from a look through a module that plays NVML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpointless.devices.health import look
from checkpointless.devices.survey import DeviceSurvey, Problem, ProblemKind
from checkpointless.doctor.devices import judge
from checkpointless.doctor.findings import Severity

FAKE = Path(__file__).parents[2] / "fake_nvml"
WELL = {"name": "H100", "recovery": 0, "links": [1], "rows": [0, 0], "ecc": 0, "lanes": [16, 16]}


def surveyed(monkeypatch: pytest.MonkeyPatch, folder: Path, *devices: dict[str, Any]) -> DeviceSurvey:
    rows = [{**WELL, "uuid": f"GPU-{n}", "bus_id": f"0000:{n}:00.0", **row} for n, row in enumerate(devices)]
    (folder / "nvml.json").write_text(json.dumps({"devices": rows} if rows else {}))
    monkeypatch.setenv("FAKE_NVML", str(folder / "nvml.json"))
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    return look(60.0)


@pytest.mark.slow
def test_a_bad_device_is_an_error_and_a_slow_one_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lost, slow = judge(surveyed(monkeypatch, tmp_path, {}, {"lost": True}, {"lanes": [8, 16]}))
    assert (lost.severity, slow.severity) == (Severity.ERROR, Severity.WARNING)
    assert lost.seen.startswith("GPU 1")
    assert slow.seen.startswith("GPU 2")
    assert "take the node out of the job" in lost.todo


@pytest.mark.slow
def test_healthy_devices_are_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (found,) = judge(surveyed(monkeypatch, tmp_path, {}, {}))
    assert found.severity is Severity.OK
    assert found.seen.startswith("no problem on GPU 0 (H100, GPU-0")


@pytest.mark.slow
def test_a_machine_without_a_gpu_is_no_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (found,) = judge(surveyed(monkeypatch, tmp_path))
    assert (found.severity, found.seen) == (
        Severity.OK,
        "there is no GPU (no NVIDIA driver): jobs train on CPUs here",
    )


def test_what_cannot_be_read_and_the_network_are_warnings() -> None:
    port = Problem(ProblemKind.NETWORK, "RDMA port mlx5_0/1 is DOWN, and was ACTIVE", False)
    network, error = judge(DeviceSurvey(error="NVML did not answer within 10 s", network=(port,)))
    assert (network.severity, error.severity) == (Severity.WARNING, Severity.WARNING)
    assert (network.seen, error.seen) == (port.what, "NVML did not answer within 10 s")
