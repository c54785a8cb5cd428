"""What the readings of a device mean: which of them forbid its use, and which are only worth a warning.

All of this is pure. A reading that a device or driver does not offer is None, and says nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from checkpointless.devices.survey import Device, Problem, ProblemKind, Reading

#: The Xids whose immediate action is RESET_GPU or RESTART_BM in NVIDIA's catalogue
#: (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html). The others that ask for a restart of the
#: application may be the fault of a program, and a new process is their cure.
FATAL_XIDS = {
    46: "GPU stopped processing",
    62: "internal micro-controller halt",
    64: "memory remapping failed",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
    155: "NVLink error",
    156: "resource retirement",
    158: "GPU fatal timeout",
}

#: Xids of memory and NVLink for which the catalogue names a workflow, or an investigation, rather than an action.
#: Where they make the device unusable, its recovery action says so.
WARNING_XIDS = {
    48: "double-bit ECC error",
    63: "memory is to be remapped",
    74: "NVLink error",
    92: "many single-bit ECC errors",
    94: "contained memory error",
    **dict.fromkeys(range(144, 151), "NVLink error"),
}

#: The values of NVML's ``nvmlDeviceGpuRecoveryAction_t``
#: (https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html).
RECOVERY_ACTIONS = {
    0: "",
    1: "a reset",
    2: "a reboot of the node",
    3: "that its peer-to-peer traffic is drained",
    4: "that its peer-to-peer traffic is drained, and a reset",
    5: "a recovery of its IMEX domain",
    6: "a reset of its PCIe bus",
    7: "a reboot of the system",
}

#: The bits of NVML's reasons for lower clocks that mean a fault of cooling or power supply, not a limit.
SLOWDOWNS = {0x08: "hardware slowdown", 0x40: "thermal slowdown", 0x80: "power brake slowdown"}

UP = "ACTIVE"  # the state of an RDMA port that can be used


def judged(
    readings: Sequence[Reading],
    *,
    is_complete: bool = True,
    before: Sequence[Reading] = (),
    xids: Collection[tuple[str, int]] = (),
) -> tuple[Device, ...]:
    """Return the devices with what is wrong with each.

    Args:
        readings: what NVML said of each device that it was asked about.
        is_complete: whether it was asked about all that it sees; otherwise a missing one may be well.
        before: what it said when the agent began. A device of that time that is missing is lost.
        xids: UUID of the device and number of each Xid since the agent began.
    """
    first = {reading.uuid: reading for reading in before if reading.uuid}
    found = [
        Device(
            each.index,
            each.uuid,
            each.name,
            each.bus_id,
            problems_of(each, before=first.get(each.uuid), siblings=readings, xids=_of(each.uuid, xids)),
            each.mig_uuids,
        )
        for each in _identified(readings, before)
    ]
    seen = {device.uuid for device in found}
    for uuid, was in first.items():
        if is_complete and uuid not in seen:
            lost = Problem(ProblemKind.LOST, "NVML does not see it any more, and did when the job began", True)
            found.append(Device(was.index, uuid, was.name, was.bus_id, (lost,), was.mig_uuids))
    return tuple(sorted(found, key=lambda device: (device.index, device.uuid)))


def problems_of(
    reading: Reading, *, before: Reading | None, siblings: Sequence[Reading], xids: Collection[int]
) -> tuple[Problem, ...]:
    """Return what is wrong with one device.

    A problem is fatal if the device cannot compute rightly before somebody has reset or exchanged it, so that a new
    process on it would fail, too. Everything that only makes it slower, or that its driver deals with, is a
    warning: giving up a node for that would cost more than it gains.

    Args:
        reading: what NVML says of it.
        before: what NVML said of it when the agent began.
        siblings: what NVML says of all devices of the machine.
        xids: the device's Xids since the agent began.
    """
    if reading.is_lost:
        return (Problem(ProblemKind.LOST, "NVML says that it is lost", True), *_xid_problems(xids))
    if reading.failure:
        # A device whose handle or UUID NVML cannot give is of no use to CUDA, which asks the same driver.
        problem = Problem(ProblemKind.SILENT, f"NVML cannot read it: {reading.failure}", True)
        return (problem, *_xid_problems(xids))
    return (
        *_recovery_problems(reading),
        *_memory_problems(reading, before),
        *_link_problems(reading, before, siblings),
        *_xid_problems(xids, says_none=reading.recovery == 0),
        *_speed_problems(reading),
    )


def port_problems(ports: Sequence[tuple[str, str]], before: Sequence[tuple[str, str]]) -> tuple[Problem, ...]:
    """Return which RDMA ports went down since the agent began.

    This is a warning: a port may come back, other ports carry on, and which rank uses which port only NCCL knows.

    Args:
        ports: name and state of each port.
        before: the same, when the agent began.
    """
    now = dict(ports)
    return tuple(
        Problem(ProblemKind.NETWORK, f"RDMA port {name} is {now.get(name, 'gone')}, and was {state}", False)
        for name, state in before
        if state == UP and now.get(name) != UP
    )


def _identified(readings: Sequence[Reading], before: Sequence[Reading]) -> list[Reading]:
    """Give a device that did not even say its UUID the one that the device with its index had."""
    at = {reading.index: reading for reading in before}
    known = {reading.uuid for reading in readings}
    found = []
    for reading in readings:
        was = at.get(reading.index)
        if not reading.uuid and was is not None and was.uuid not in known:
            reading = replace(reading, uuid=was.uuid, name=was.name, bus_id=was.bus_id, mig_uuids=was.mig_uuids)
        found.append(reading)
    return found


def _of(uuid: str, xids: Collection[tuple[str, int]]) -> tuple[int, ...]:
    return tuple(sorted({number for owner, number in xids if owner == uuid}))


def _recovery_problems(reading: Reading) -> list[Problem]:
    """Every known action but none is fatal: NVIDIA asks that no work is begun before it is taken."""
    if not reading.recovery:
        return []
    action = RECOVERY_ACTIONS.get(reading.recovery)
    wanted = action or f"recovery action {reading.recovery}, which is not known here"
    return [Problem(ProblemKind.RECOVERY, f"the driver wants {wanted}", action is not None)]


def _memory_problems(reading: Reading, before: Reading | None) -> list[Problem]:
    """Judge uncorrectable errors and row remapping.

    A driver that knows recovery actions says by them whether an uncorrectable error still matters; where it says
    none, the error was contained. An older driver cannot say, so an error that came since the agent began is fatal
    there, unless the device remaps rows: then a failed remapping is what counts. An error from before forbids
    nothing. A failed remapping is NVIDIA's criterion for an exchange of the device,
    so it is fatal. A pending one is a warning: new work may be launched meanwhile (the address at
    RECOVERY_ACTIONS).
    """
    found = []
    if reading.ecc_uncorrected:
        what = f"{reading.ecc_uncorrected} uncorrectable memory errors since the driver was loaded"
        earlier = before.ecc_uncorrected if before is not None else None
        is_new = earlier is not None and reading.ecc_uncorrected > earlier
        says_more = reading.recovery is not None or reading.remap_failed is not None
        found.append(Problem(ProblemKind.ECC, what, is_new and not says_more))
    if reading.remap_failed:
        found.append(Problem(ProblemKind.ROW_REMAPPING, "a row of memory could not be remapped", True))
    if reading.remap_pending:
        found.append(Problem(ProblemKind.ROW_REMAPPING, "a row of memory is remapped at the next reset", False))
    return found


def _link_problems(reading: Reading, before: Reading | None, siblings: Sequence[Reading]) -> list[Problem]:
    """Judge NVLinks: one that went down is fatal, one that never was up is a warning.

    NCCL has laid its rings over a link that was up, and its collectives fail or hang there again. Over one that is
    down from the beginning the job has trained; that the same link of all other devices is up only tells that the
    device is slower than they are.
    """
    down = [number for number, is_active in reading.links if not is_active]
    was = dict(before.links) if before is not None else {}
    went = [number for number in down if was.get(number)]
    others = [dict(each.links) for each in siblings if each.index != reading.index and each.name == reading.name]
    never = [n for n in down if n not in went and others and all(links.get(n) for links in others)]
    found = []
    if went:
        found.append(Problem(ProblemKind.NVLINK, f"NVLink {_numbers(went)} went down", True))
    if never:
        what = f"NVLink {_numbers(never)} is inactive, and active on the other devices"
        found.append(Problem(ProblemKind.NVLINK, what, False))
    return found


def _xid_problems(xids: Collection[int], *, says_none: bool = False) -> list[Problem]:
    """Judge Xids; one is a warning if the driver says that it wants no recovery action (any more)."""
    known = {**FATAL_XIDS, **WARNING_XIDS}
    return [
        Problem(ProblemKind.XID, f"Xid {number}: {known[number]}", number in FATAL_XIDS and not says_none)
        for number in sorted(xids)
        if number in known
    ]


def _speed_problems(reading: Reading) -> list[Problem]:
    """What makes a device slow is a warning: it computes rightly, and a spare costs a recovery of the whole job."""
    found = []
    width, widest = reading.pcie_width, reading.pcie_width_max
    if width is not None and widest is not None and width < widest:
        what = f"its PCIe link has {width} of {widest} lanes"
        found.append(Problem(ProblemKind.PCIE, what, False))
    for bit, what in SLOWDOWNS.items():
        if (reading.slowdown or 0) & bit:
            found.append(Problem(ProblemKind.SLOWDOWN, what, False))
    return found


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
