"""Plays NVML: says of devices what a JSON file says, and raises or hangs where the real one would.

The file is named by ``FAKE_NVML``::

    {"devices": [{"uuid": "GPU-a", "recovery": 1}, {"uuid": "GPU-b", "hang": "name"}], "xids": [["GPU-a", 79]]}

``lost`` and ``forbidden`` raise at the handle, ``slow`` is how many seconds the name takes, and ``hang`` names the
question that never returns (``init``, ``handle`` or ``name``); what a device lacks is not supported. What stands
under ``then`` of a device counts once the folder ``when`` has a file. ``ports`` is the folder in which the states
of network ports are, and ``prints`` is printed at the begin. The file is read at each question, so that a test can
change it meanwhile.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from checkpointless.devices import ports

NVML_SUCCESS = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 1
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
NVML_NVLINK_MAX_LINKS = 18
nvmlEventTypeXidCriticalError = 8


class NVMLError(Exception):
    """What every error of the real module is."""


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_DriverNotLoaded(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    def __str__(self) -> str:
        return "GPU is lost"


class NVMLError_ResetRequired(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    def __str__(self) -> str:
        return "Insufficient Permissions"


class NVMLError_NotSupported(NVMLError):
    def __str__(self) -> str:
        return "Not Supported"


class NVMLError_Timeout(NVMLError):
    pass


_TAKEN: list[Any] = []


def _said() -> dict[str, Any]:
    said: dict[str, Any] = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
    for device in said.get("devices", []):
        if "when" in device and any(Path(device["when"]).glob("*")):
            device.update(device["then"])
    return said


def _hang() -> None:
    while True:
        ctypes.CDLL(None).sleep(1000)  # no signal of Python's reaches it


def _of(handle: int, key: str) -> Any:
    device = _said()["devices"][handle]
    if device.get("hang") == key:
        _hang()
    if key not in device:
        raise NVMLError_NotSupported
    return device[key]


def nvmlInit() -> None:
    said = _said()
    if "prints" in said:
        print(said["prints"])
    if "ports" in said:
        ports.read_ports.__defaults__ = (Path(said["ports"]),)
    if said.get("hang") == "init":
        _hang()
    if "devices" not in said:
        raise NVMLError_LibraryNotFound


def nvmlSystemGetDriverVersion() -> bytes:
    return b"570.86.15"


def nvmlSystemGetCudaDriverVersion() -> int:
    return 12080


def nvmlDeviceGetCount() -> int:
    return len(_said()["devices"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    device = _said()["devices"][index]
    if device.get("hang") == "handle":
        _hang()
    if device.get("lost"):
        raise NVMLError_GpuIsLost
    if device.get("forbidden"):
        raise NVMLError_NoPermission
    return index


def nvmlDeviceGetUUID(handle: Any) -> str:
    if isinstance(handle, tuple):
        return str(_of(handle[0], "mig")[handle[1]])
    return str(_of(handle, "uuid"))


def nvmlDeviceGetName(handle: int) -> str:
    time.sleep(_said()["devices"][handle].get("slow", 0))
    return str(_of(handle, "name"))


def nvmlDeviceGetPciInfo(handle: int) -> Any:
    return SimpleNamespace(busId=_of(handle, "bus_id"))


def nvmlDeviceGetRemappedRows(handle: int) -> tuple[int, int, int, int]:
    pending, failed = _of(handle, "rows")
    return 0, 0, pending, failed


def nvmlDeviceGetTotalEccErrors(handle: int, kind: int, counter: int) -> int:
    return int(_of(handle, "ecc"))


def nvmlDeviceGetFieldValues(handle: int, fields: list[int]) -> list[Any]:
    assert fields == [NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=_of(handle, "recovery")))]


def nvmlDeviceGetCurrPcieLinkWidth(handle: int) -> int:
    return int(_of(handle, "lanes")[0])


def nvmlDeviceGetMaxPcieLinkWidth(handle: int) -> int:
    return int(_of(handle, "lanes")[1])


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: int) -> int:
    return int(_of(handle, "slowdown"))


def nvmlDeviceGetNvLinkState(handle: int, link: int) -> int:
    links = _of(handle, "links")
    if link >= len(links):
        raise NVMLError_NotSupported
    return int(links[link])


def nvmlDeviceGetMaxMigDeviceCount(handle: int) -> int:
    return len(_of(handle, "mig"))


def nvmlDeviceGetMigDeviceHandleByIndex(handle: int, index: int) -> tuple[int, int]:
    return handle, index


def nvmlEventSetCreate() -> list[int]:
    return []


def nvmlDeviceRegisterEvents(handle: int, kinds: int, events: list[int]) -> None:
    assert kinds == nvmlEventTypeXidCriticalError
    events.append(handle)


def nvmlEventSetWait(events: list[int], timeout_ms: int) -> Any:
    said = _said()
    for uuid, number in said.get("xids", [])[len(_TAKEN) :]:
        _TAKEN.append(uuid)
        handle = next(index for index, device in enumerate(said["devices"]) if device.get("uuid") == uuid)
        return SimpleNamespace(device=handle, eventData=number)
    time.sleep(min(timeout_ms / 1000, 0.05))
    raise NVMLError_Timeout
