"""What this project knows of frameworks beyond their public interfaces: private names, options, versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import metadata

CORE, BRIDGE = "megatron-core", "megatron-bridge"
#: What tests run together: versions of a framework, each with that of Megatron-core which belongs to it.
TESTED = {"nemo_toolkit": {"2.7": "0.15"}, BRIDGE: {"0.3": "0.16", "0.6": "0.19"}}


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the version of each package that is installed, by the name of its distribution."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def untested(versions: Mapping[str, str]) -> str | None:
    """Return in one line which ``versions`` of installed packages no test has run together; or None."""
    for framework, known in TESTED.items():
        found, core = versions.get(framework), versions.get(CORE, "missing")
        if found and not core.startswith(f"{known.get('.'.join(found.split('.')[:2]))}."):
            tested = " and ".join(f"{version} with {its_core}" for version, its_core in known.items())
            return f"{framework} {found} with {CORE} {core}; tested: {tested}"
    return None
