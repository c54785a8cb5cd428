"""What a look at the devices of a machine found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

NO_DRIVER = "no NVIDIA driver"
NO_MODULE = "the devices are not looked at: pip install -e '.[gpu]' in a clone installs what asks NVML"


class ProblemKind(Enum):
    """What may be wrong with a device, or with the network beside it."""

    LOST = "fell off the bus"
    SILENT = "does not answer"
    RECOVERY = "wants a recovery action"
    ECC = "uncorrectable memory errors"
    ROW_REMAPPING = "row remapping"
    NVLINK = "NVLink"
    XID = "Xid"
    PCIE = "PCIe link"
    SLOWDOWN = "slowdown"
    NETWORK = "network port"
    FAILURES = "failures of processes on it"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: one line for people.
        is_fatal: whether the device must not be used; otherwise this is a warning.
    """

    kind: ProblemKind
    what: str
    is_fatal: bool


@dataclass(frozen=True)
class Device:
    """A GPU of this machine.

    Attributes:
        index: the device's number for NVML, which counts in the order of PCI addresses.
        uuid: the device's UUID, ``GPU-...``; "" if it could not be read.
        name: name of the model.
        bus_id: the device's PCI address.
        problems: what is wrong with it.
        mig_uuids: UUIDs of the MIG devices that it is divided into.
    """

    index: int
    uuid: str
    name: str
    bus_id: str
    problems: tuple[Problem, ...] = ()
    mig_uuids: tuple[str, ...] = ()

    @property
    def fatal(self) -> tuple[Problem, ...]:
        """The problems because of which the device must not be used."""
        return tuple(problem for problem in self.problems if problem.is_fatal)

    def __str__(self) -> str:
        known = ", ".join(word for word in (self.name, self.uuid, self.bus_id) if word)
        return f"GPU {self.index}" + (f" ({known})" if known else "")


@dataclass(frozen=True)
class Reading:
    """What NVML said of one device.

    Attributes:
        index: the device's number for NVML.
        uuid: the device's UUID ("": not read).
        name: name of the model ("": not read).
        bus_id: PCI address ("": not read).
        mig_uuids: UUIDs of its MIG devices.
        failure: why the device could not be read, in NVML's words ("" if it could).
        is_lost: whether NVML said that the GPU is lost.
        recovery: the recovery action that the device wants (0: none).
        ecc_uncorrected: how many uncorrectable memory errors there were since the driver was loaded.
        remap_pending: whether a row of memory is remapped at the next reset.
        remap_failed: whether a row of memory could not be remapped.
        links: for each NVLink, by number, whether it is active.
        pcie_width: width of the PCIe link, in lanes.
        pcie_width_max: width that the device and its slot can have, in lanes.
        slowdown: NVML's bits of reasons for lower clocks.
    """

    index: int
    uuid: str = ""
    name: str = ""
    bus_id: str = ""
    mig_uuids: tuple[str, ...] = ()
    failure: str = ""
    is_lost: bool = False
    recovery: int | None = None
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    links: tuple[tuple[int, bool], ...] = ()
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    slowdown: int | None = None


@dataclass(frozen=True)
class DeviceSurvey:
    """The devices of this machine.

    Attributes:
        devices: the devices, by index.
        driver_version: version of NVIDIA's driver, for example "570.86.15"; "" if not known.
        cuda_driver_version: newest version of CUDA that the driver supports, for example "12.8"; "" if not known.
        error: why nothing could be read, in one line ("" if it could). :data:`NO_DRIVER` is not a problem, and
            neither that nor :data:`NO_MODULE` changes while a process runs.
        network: what is wrong with RDMA ports, which belong to no single device; all of it is warnings.
        readings: what NVML said of each device, to compare a later look with.
        ports: name and state of each RDMA port, for example ``("mlx5_0/1", "ACTIVE")``.
    """

    devices: tuple[Device, ...] = ()
    driver_version: str = ""
    cuda_driver_version: str = ""
    error: str = ""
    network: tuple[Problem, ...] = ()
    readings: tuple[Reading, ...] = ()
    ports: tuple[tuple[str, str], ...] = ()
