"""What prepares processes for a platform that the frameworks do not support: entry points, found by name.

A package offers a platform as an entry point of the group :data:`GROUP`: the platform's name, and a function
without arguments that is called once in the zygote, or in each rank's own interpreter, before the script runs.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

GROUP = "checkpointless.platforms"
CPU = "cpu"


class PlatformMissingError(RuntimeError):
    """No installed package offers the platform; the message says what to do."""


def find_platform(name: str) -> EntryPoint:
    """Return the entry point of a platform, without loading it.

    Raises:
        PlatformMissingError: there is none.
    """
    for entry in entry_points(group=GROUP, name=name):
        return entry
    raise PlatformMissingError(
        f"no installed package has the entry point {name!r} in {GROUP}: install checkpointless again "
        "(pip install -e . in a clone)"
    )


def install_platform(name: str) -> None:
    """Prepare this process for a platform.

    Raises:
        PlatformMissingError: no installed package offers it.
        ImportError, AttributeError: its function does not exist.
    """
    find_platform(name).load()()
