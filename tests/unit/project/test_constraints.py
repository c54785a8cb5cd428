"""Check that every release of Python 3.11 can install the pinned packages, not only the newest one."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

PINNED = re.findall(
    r"^([\w.-]+)==([\w.+]+)",
    (Path(__file__).parents[3] / "constraints" / "nemo-cpu.txt").read_text(encoding="utf-8"),
    re.MULTILINE,
)


@pytest.mark.nemo  # NeMo brings most of them
def test_the_pinned_packages_install_with_the_first_python_3_11() -> None:
    looked_at = 0
    for name, version in PINNED:
        try:
            found = metadata(name)
        except PackageNotFoundError:
            continue
        if found["Version"].partition("+")[0] != version:
            continue  # another one is installed here
        looked_at += 1
        requires = str(found.json.get("requires_python", ""))
        assert SpecifierSet(requires).contains("3.11.0"), f"{name} {version} requires Python {requires}"
    assert looked_at > 100
