"""Reads the states of RDMA ports, as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path("/sys/class/infiniband")  # Documentation/ABI/stable/sysfs-class-infiniband of Linux


def read_ports(folder: Path = FOLDER) -> tuple[tuple[str, str], ...]:
    """Return name and state of each RDMA port, for example ``("mlx5_0/1", "ACTIVE")``.

    Args:
        folder: folder of the kernel's file system in which RDMA devices are.
    """
    found = []
    for path in sorted(folder.glob("*/ports/*/state")):
        try:
            text = path.read_text()  # "4: ACTIVE"
        except OSError:  # the device is being removed
            continue
        found.append((f"{path.parts[-4]}/{path.parts[-2]}", text.rpartition(":")[2].strip()))
    return tuple(found)
