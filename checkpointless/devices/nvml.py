"""Reads devices through a module that offers NVML (``pynvml``), which the caller imports.

Every call may hang on a bad device, so this runs in a process of its own
(:mod:`checkpointless.devices.nvml_process`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from checkpointless.devices.survey import Reading

_MOST_LINKS = 18  # of Hopper; a newer module names the number that its driver knows
_EVENT_WAIT_MS = 1000


def versions(nvml: Any) -> tuple[str, str]:  # Any: an untyped module
    """Return the version of the driver and the newest version of CUDA that it supports ("": not known)."""
    said = _Said(nvml)
    driver = _text(said.ask(nvml.nvmlSystemGetDriverVersion))
    cuda = said.ask(nvml.nvmlSystemGetCudaDriverVersion)  # 12080 for 12.8
    return driver, "" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}"


def read(nvml: Any, index: int) -> Reading | None:  # Any: an untyped module
    """Return what NVML says of the device with this number, whatever is wrong with the device.

    Returns:
        None if the device is not for this process (a container or a batch system keeps it away): CUDA does not
        count it either.
    """
    said = _Said(nvml)
    handle = said.ask(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    uuid = _text(said.ask(lambda: nvml.nvmlDeviceGetUUID(handle))) if handle is not None else ""
    if said.is_forbidden:
        return None
    if not uuid:
        return Reading(index, failure=said.error or "it has no UUID", is_lost=said.is_lost)
    name = _text(said.ask(lambda: nvml.nvmlDeviceGetName(handle)))
    pci = said.ask(lambda: nvml.nvmlDeviceGetPciInfo(handle))
    rows = said.ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    ecc = said.ask(
        lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    )
    recovery = said.ask(lambda: _recovery_action(nvml, handle))
    width = said.ask(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))
    width_max = said.ask(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    slowdown = said.ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return Reading(
        index,
        uuid,
        name,
        _text(pci.busId) if pci is not None else "",
        mig_uuids=tuple(_mig_uuids(nvml, said, handle)),
        links=tuple(_links(nvml, said, handle)),
        recovery=recovery if recovery or not said.needs_reset else 1,
        ecc_uncorrected=ecc,
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        pcie_width=width,
        pcie_width_max=width_max,
        slowdown=slowdown,
        is_lost=said.is_lost,  # of any of the answers
    )


def xids(nvml: Any) -> Iterator[tuple[str, int]]:  # Any: an untyped module
    """Yield the UUID of the device and the number of each Xid from here on, without an end."""
    events = nvml.nvmlEventSetCreate()
    said = _Said(nvml)
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = said.ask(partial(nvml.nvmlDeviceGetHandleByIndex, index))
        if handle is not None:
            kinds = nvml.nvmlEventTypeXidCriticalError
            said.ask(partial(nvml.nvmlDeviceRegisterEvents, handle, kinds, events))
    while True:
        try:
            event = nvml.nvmlEventSetWait(events, _EVENT_WAIT_MS)
        except nvml.NVMLError_Timeout:
            continue
        uuid = _text(said.ask(partial(nvml.nvmlDeviceGetUUID, event.device)))
        if uuid:
            yield uuid, int(event.eventData)


class _Said:
    """What NVML answers, and what its refusals tell of the device.

    Attributes:
        error: the first refusal, in NVML's words ("": none yet).
        is_lost: whether NVML has said that the GPU is lost.
        needs_reset: whether NVML has said that the GPU requires a reset.
        is_forbidden: whether NVML has said that this process may not use the GPU.
    """

    def __init__(self, nvml: Any) -> None:
        self.error = ""
        self.is_lost = False
        self.needs_reset = False
        self.is_forbidden = False
        self._nvml = nvml

    def ask(self, question: Callable[[], Any]) -> Any:
        """Return the answer, or None if there is none: many devices and drivers lack some of them."""
        nvml = self._nvml
        try:
            return question()
        except nvml.NVMLError as error:
            self.error = self.error or str(error)
            self.is_lost = self.is_lost or isinstance(error, nvml.NVMLError_GpuIsLost)
            self.needs_reset = self.needs_reset or isinstance(error, nvml.NVMLError_ResetRequired)
            self.is_forbidden = self.is_forbidden or isinstance(error, nvml.NVMLError_NoPermission)
            return None


def _recovery_action(nvml: Any, handle: Any) -> int | None:
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)  # since 570
    if field is None:
        return None
    answer = nvml.nvmlDeviceGetFieldValues(handle, [field])[0]
    return int(answer.value.uiVal) if answer.nvmlReturn == nvml.NVML_SUCCESS else None


def _links(nvml: Any, said: _Said, handle: Any) -> Iterator[tuple[int, bool]]:
    for number in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", _MOST_LINKS)):
        state = said.ask(partial(nvml.nvmlDeviceGetNvLinkState, handle, number))
        if state is None:  # the device has no link of this number, and none after it
            return
        yield number, bool(state)


def _mig_uuids(nvml: Any, said: _Said, handle: Any) -> Iterator[str]:
    for number in range(said.ask(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
        part = said.ask(partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number))
        uuid = _text(said.ask(partial(nvml.nvmlDeviceGetUUID, part))) if part is not None else ""
        if uuid:
            yield uuid


def _text(value: str | bytes | None) -> str:
    """Return text that older versions of the module give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
