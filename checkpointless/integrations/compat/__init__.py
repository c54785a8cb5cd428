"""What this project knows of frameworks beyond their public interfaces: private names, options, versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import metadata

CORE, BRIDGE = "megatron-core", "megatron-bridge"
#: What tests run together: a framework, its version, and that of Megatron-core which belongs to it.
TESTED = (("nemo_toolkit", "2.7", "0.15"), (BRIDGE, "0.3", "0.16"), (BRIDGE, "0.6", "0.19"))


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
    """Return which installed versions no test has run together.

    Args:
        versions: version of each installed package, by the name of its distribution.

    Returns:
        One line that says what was tested; None if there is nothing to say.
    """
    core = versions.get(CORE, "")
    for framework in dict.fromkeys(name for name, _, _ in TESTED):
        known = [(version, its_core) for name, version, its_core in TESTED if name == framework]
        found = versions.get(framework)
        if found and not any(_is_of(found, version) and _is_of(core, its_core) for version, its_core in known):
            tested = " and ".join(f"{version} with {its_core}" for version, its_core in known)
            return f"{framework} {found} with {CORE} {core or 'missing'}; tested: {tested}"
    if core and not any(name in versions for name, _, _ in TESTED):
        cores = sorted({its_core for _, _, its_core in TESTED})
        if not any(_is_of(core, each) for each in cores):
            return f"{CORE} {core}; tested: {', '.join(cores)}"
    return None


def _is_of(version: str, line: str) -> bool:
    return f"{version}.".startswith(f"{line}.")
