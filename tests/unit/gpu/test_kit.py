"""Test what ``make gpu-kit`` collects, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gpu import kit
from tests.gpu.kit import ROOT, name_of, requirements
from tests.wheel.contents import differing

PYPROJECT = (ROOT / "pyproject.toml").read_text()


def test_the_kit_has_every_dependency_of_the_base_install_that_does_not_come_with_torch() -> None:
    names = {name_of(each) for each in requirements(PYPROJECT)}
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", PYPROJECT, re.M | re.S)
    base = {name_of(each) for each in re.findall(r'^\s*"([^"]+)"', block, re.M)}
    assert len(base) >= 7
    assert base - names == base & kit.WITH_TORCH
    assert {"torch", "nemo-toolkit", "nemo"} & names == set()
    assert {"megatron-core", "pytest", "pytest-timeout", "hypothesis"} <= names


@pytest.mark.long
def test_the_kit_is_made_from_the_package_index(tmp_path: Path) -> None:
    wheels = {each.name for each in kit.make(tmp_path / "kit", "3.12", 0)}
    assert any(name.startswith("megatron_core-0.15") and "cp312" in name for name in wheels)
    (ours,) = [name for name in wheels if name.startswith("checkpointless-")]
    assert differing(tmp_path / "kit" / ours, ROOT) == []
