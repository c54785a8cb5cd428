"""The health of a node's devices, as NVML tells it."""

from __future__ import annotations

from checkpointless.devices.survey import NO_DRIVER, DeviceSurvey
from checkpointless.doctor.findings import Family, Finding, Severity

LOOK_TIMEOUT_S = 10.0
_SOURCE = "NVML"
_NETWORK_SOURCE = "the kernel's RDMA ports"


def judge(survey: DeviceSurvey) -> list[Finding]:
    """Return what is wrong with the devices. A machine without a GPU is no problem: it may train on CPUs."""
    findings = []
    for device in survey.devices:
        for problem in device.problems:
            severity = Severity.ERROR if problem.is_fatal else Severity.WARNING
            todo = "take the node out of the job, and have the device reset or exchanged"
            if not problem.is_fatal:
                todo = "look at nvidia-smi -q; the job runs, but slower"
            findings.append(Finding(Family.DEVICES, severity, f"{device}: {problem.what}", _SOURCE, todo))
    for problem in survey.network:
        todo = "look at ibstat, cable and switch"
        findings.append(Finding(Family.DEVICES, Severity.WARNING, problem.what, _NETWORK_SOURCE, todo))
    if survey.error == NO_DRIVER:
        seen = f"there is no GPU ({NO_DRIVER}): jobs train on CPUs here"
        findings.append(Finding(Family.DEVICES, Severity.OK, seen, _SOURCE))
    elif survey.error:
        todo = "see the message; nvidia-smi should answer"
        findings.append(Finding(Family.DEVICES, Severity.WARNING, survey.error, _SOURCE, todo))
    if not findings:
        names = ", ".join(str(device) for device in survey.devices)
        findings.append(Finding(Family.DEVICES, Severity.OK, f"no problem on {names or 'any device'}", _SOURCE))
    return findings
