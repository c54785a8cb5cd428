"""Test what is said of devices, from what ``nvidia-smi -q -x`` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointless.doctor import devices
from checkpointless.doctor.findings import Severity

GPU = """<gpu id="0000:{number}:00.0"><product_name>H100</product_name><uuid>GPU-{number}</uuid>
{more}<remapped_rows><remapped_row_pending>{pending}</remapped_row_pending>
<remapped_row_failure>{failure}</remapped_row_failure></remapped_rows></gpu>"""


def log(*gpus: dict[str, str]) -> str:
    well = {"more": "", "pending": "No", "failure": "No"}
    rows = "".join(GPU.format(number=number, **{**well, **gpu}) for number, gpu in enumerate(gpus))
    return f'<?xml version="1.0" ?>\n<nvidia_smi_log><cuda_version>12.8</cuda_version>{rows}</nvidia_smi_log>'


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The program that stands in for ``nvidia-smi``, on a machine with a driver."""
    monkeypatch.setattr(devices, "has_driver", lambda: True)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    path = tmp_path / "nvidia-smi"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_bad_device_is_an_error_and_what_waits_for_a_reset_a_warning() -> None:
    reset = "<gpu_recovery_action>Reset</gpu_recovery_action>"
    found = devices.understand(log({}, {"failure": "Yes"}, {"pending": "Yes"}, {"more": reset}))
    assert found.cuda == "12.8"
    severities = [each.severity for each in found.findings]
    assert severities == [Severity.ERROR, Severity.WARNING, Severity.ERROR]
    assert found.findings[0].seen == "GPU 1 (H100, GPU-1, 0000:1:00.0): a row of memory could not be remapped"
    assert found.findings[2].seen.endswith("the driver wants a recovery action: Reset")
    assert "take the node out of the job" in found.findings[0].todo


def test_healthy_devices_are_right_also_if_not_all_is_known() -> None:
    (found,) = devices.understand(log({}, {"pending": "N/A", "failure": "N/A"})).findings
    assert found.severity is Severity.OK
    assert found.seen.startswith("no problem on GPU 0 (H100, GPU-0")


def test_a_machine_without_a_gpu_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_driver", lambda: False)
    (found,) = devices.read().findings
    assert (found.severity, found.seen) == (
        Severity.OK,
        "there is no GPU (no NVIDIA driver): jobs train on CPUs here",
    )


def test_the_program_is_asked(smi: Path) -> None:
    smi.write_text(f"#!/bin/sh\ncat <<'END'\n{log({})}\nEND\n")
    (found,) = devices.read().findings
    assert found.severity is Severity.OK


def test_a_device_that_is_lost_or_does_not_answer_is_an_error(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.write_text("#!/bin/sh\necho 'Unable to determine the device handle: GPU is lost'; exit 15\n")
    (found,) = devices.read().findings
    assert (found.severity, found.seen) == (
        Severity.ERROR,
        "nvidia-smi exited with 15: Unable to determine the device handle: GPU is lost",
    )
    monkeypatch.setattr(devices, "SMI_TIMEOUT_S", 0.1)
    smi.write_text("#!/bin/sh\nexec sleep 60\n")
    (found,) = devices.read().findings
    assert (found.severity, found.seen) == (Severity.ERROR, "nvidia-smi did not answer within 0.1 s")


def test_without_the_program_nothing_is_known(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(smi.parent / "nowhere"))
    (found,) = devices.read().findings
    assert (found.severity, found.seen) == (
        Severity.WARNING,
        "the devices are not looked at: nvidia-smi: No such file or directory",
    )
