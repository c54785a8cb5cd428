"""A process that asks NVML, which may hang: ``python -m checkpointless.devices.nvml_process {look|xids} ...``.

It prints JSON objects, one per line, as soon as it knows them, so that its parent knows what it was asking about
when it stopped. It ends when its standard input is closed, unless the kernel holds it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from checkpointless.devices import nvml
from checkpointless.devices.ports import read_ports
from checkpointless.devices.survey import NO_DRIVER

LOOK, XIDS = "look", "xids"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what NVML says of the devices, or each Xid as it comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=(LOOK, XIDS))
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(arguments)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import pynvml

    _say(begun=True)
    try:
        pynvml.nvmlInit()
        if options.task == LOOK:
            _look(pynvml, options.first)
        else:
            told: set[tuple[str, int]] = set()
            for uuid, number in nvml.xids(pynvml):
                if (uuid, number) not in told:  # nobody may read for a long time, and the pipe must not fill up
                    told.add((uuid, number))
                    _say(xid=number, uuid=uuid)
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        _say(error=NO_DRIVER)
    except pynvml.NVMLError as error:
        _say(error=f"NVML: {error}")


def _look(pynvml: Any, first: int) -> None:
    driver, cuda = nvml.versions(pynvml)
    _say(driver=driver, cuda=cuda)
    for index in sorted(range(pynvml.nvmlDeviceGetCount()), key=lambda index: index != first):
        _say(asking=index)
        reading = nvml.read(pynvml, index)
        _say(reading=asdict(reading) if reading is not None else None)
    _say(end=True)
    _say(ports=read_ports())


def _say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    sys.stdin.read()  # nothing is ever written to it
    os._exit(0)


if __name__ == "__main__":
    main()
