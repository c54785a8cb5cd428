"""Which device a rank uses: what ``CUDA_VISIBLE_DEVICES`` makes of its local rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from checkpointless.devices.survey import Device

PCI_BUS_ID = "PCI_BUS_ID"  # the value of CUDA_DEVICE_ORDER with which CUDA counts as NVML does


def device_of(local_rank: int, devices: Sequence[Device], visible: str | None, order: str | None) -> Device | None:
    """Return the device that is number ``local_rank`` for CUDA, or None if that cannot be told.

    ``CUDA_VISIBLE_DEVICES`` is a list of numbers, of UUIDs (``GPU-...``, of which a beginning that only one device
    has is enough) and of MIG devices (``MIG-...``), which ends at the first entry that names no device
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables). The device of a
    MIG device is the GPU that it is a part of. Numbers count the devices that this process may use, the fastest
    first, unless ``CUDA_DEVICE_ORDER`` says otherwise; with devices of one model that is the order of NVML.

    Args:
        local_rank: the rank within its node.
        devices: all devices of the machine that this process may use.
        visible: the value of ``CUDA_VISIBLE_DEVICES`` (None: not set).
        order: the value of ``CUDA_DEVICE_ORDER`` (None: not set).
    """
    in_order = sorted(devices, key=lambda device: device.index)
    # Whether CUDA counts a device that NVML cannot read is not known, nor then what it counts after it.
    counted = dict(enumerate(takewhile(lambda device: device.uuid, in_order)))
    is_counted_alike = order == PCI_BUS_ID or len({device.name for device in devices if device.name}) <= 1
    if visible is None:
        return counted.get(local_rank) if is_counted_alike else None
    for place, entry in enumerate(each.strip() for each in visible.split(",")):
        if entry.isdigit():
            found, known = counted.get(int(entry)), is_counted_alike
        else:
            found, known = _named(entry, devices), True
        if found is None:
            return None
        if place == local_rank:
            return found if known else None
    return None


def _named(entry: str, devices: Sequence[Device]) -> Device | None:
    """Return the device that a UUID names."""
    if entry.startswith("MIG-GPU-"):  # of drivers before 470: MIG-GPU-<uuid>/<GPU instance>/<compute instance>
        entry = entry.removeprefix("MIG-").partition("/")[0]
    if entry.startswith("MIG-"):
        found = [device for device in devices if any(uuid.startswith(entry) for uuid in device.mig_uuids)]
    elif entry.startswith("GPU-"):
        found = [device for device in devices if device.uuid.startswith(entry)]
    else:
        return None
    return found[0] if len(found) == 1 else None
