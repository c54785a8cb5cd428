"""The health of a node's devices, as ``nvidia-smi`` tells it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from xml.etree import ElementTree

from checkpointless.doctor.findings import Family, Finding, Severity
from checkpointless.doctor.versions import has_driver
from checkpointless.telemetry.wording import printable

SMI_TIMEOUT_S = 20.0  # it takes seconds to begin without persistence mode
_SMI = ("nvidia-smi", "-q", "-x")
_SICK = "take the node out of the job, and have the device reset or exchanged"
_SLOW = "look at nvidia-smi -q; the job runs, but slower"
_BAD = ("Yes", "Reset", "Reboot", "Drain P2P", "Drain and Reset")
#: Of each device: where one of these words is said, what it means, how much that matters, and what to do.
_LOOKS = (
    ("gpu_recovery_action", "the driver wants a recovery action: {}", Severity.ERROR, _SICK),
    (".//remapped_row_failure", "a row of memory could not be remapped", Severity.ERROR, _SICK),
    (".//remapped_row_pending", "a row of memory is remapped at the next reset", Severity.WARNING, _SLOW),
)


@dataclass(frozen=True)
class Devices:
    """What is known of the devices.

    Attributes:
        cuda: newest version of CUDA that the driver supports ("": not known).
        findings: what is wrong with the devices, or that nothing is.
    """

    cuda: str
    findings: tuple[Finding, ...]


def read() -> Devices:
    """Ask ``nvidia-smi``. A machine without a GPU is no problem: it may train on CPUs."""
    if not has_driver():
        return _nothing(Severity.OK, "there is no GPU (no NVIDIA driver): jobs train on CPUs here")
    try:
        ended = subprocess.run(_SMI, capture_output=True, text=True, errors="replace", timeout=SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return _nothing(Severity.ERROR, f"nvidia-smi did not answer within {SMI_TIMEOUT_S:g} s", _SICK)
    except OSError as error:
        todo = "have nvidia-smi on the PATH"
        return _nothing(Severity.WARNING, f"the devices are not looked at: nvidia-smi: {error.strerror}", todo)
    if ended.returncode != 0:
        said = printable(ended.stderr or ended.stdout, 200)
        return _nothing(Severity.ERROR, f"nvidia-smi exited with {ended.returncode}: {said}", _SICK)
    return understand(ended.stdout)


def understand(text: str) -> Devices:
    """Return what the output of ``nvidia-smi -q -x`` means."""
    log = ElementTree.fromstring(text)
    findings, names = [], []
    for number, gpu in enumerate(log.iter("gpu")):
        name = f"GPU {number} ({gpu.findtext('product_name')}, {gpu.findtext('uuid')}, {gpu.get('id')})"
        names.append(name)
        for path, what, severity, todo in _LOOKS:
            said = gpu.findtext(path)
            if said in _BAD:
                findings.append(_finding(severity, f"{name}: {what.format(said)}", todo))
    if not findings:
        findings.append(_finding(Severity.OK, f"no problem on {', '.join(names) or 'any device'}"))
    return Devices(log.findtext("cuda_version") or "", tuple(findings))


def _nothing(severity: Severity, seen: str, todo: str = "") -> Devices:
    return Devices("", (_finding(severity, seen, todo),))


def _finding(severity: Severity, seen: str, todo: str = "") -> Finding:
    return Finding(Family.DEVICES, severity, seen, "nvidia-smi", todo)
