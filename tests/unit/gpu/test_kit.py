"""Test what ``make gpu-kit`` collects, and what it refuses."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from tests.gpu import kit
from tests.gpu.kit import (
    ROOT,
    KitError,
    check_size,
    fits,
    lacking,
    name_of,
    required_by,
    requirements,
    unpack,
)
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


def test_the_versions_are_those_of_the_project() -> None:
    assert "megatron-core>=0.15,<0.16" in requirements(PYPROJECT)
    with pytest.raises(KitError, match="has no list 'dependencies'"):
        requirements("[project]\n")


@pytest.mark.parametrize(
    ("text", "name"),
    [("Lightning_Utilities>=0.1", "lightning-utilities"), ("fsspec[http]<2027; x", "fsspec"), ("a.b", "a-b")],
)
def test_a_name_is_normalised(text: str, name: str) -> None:
    assert name_of(text) == name


def test_a_requirement_that_nobody_brings_is_found() -> None:
    needs = {
        "lightning": ["torch>=2", "tqdm", 'ipython; extra == "dev"', 'tomli; python_version < "3.11"'],
        "tqdm": ['colorama; sys_platform == "win32"', 'colorama; platform_system == "Windows"'],
    }
    assert lacking(needs) == []
    assert lacking({"lightning": ["tqdm>=4"]}) == ["lightning needs tqdm"]


def test_a_kit_that_is_too_large_is_refused_in_one_line() -> None:
    check_size({"a.whl": 25_000_000, "b.whl": 30_000_000})
    with pytest.raises(KitError) as caught:
        check_size({"a.whl": 1_000_000, "b.whl": 60_000_000})
    assert str(caught.value) == "the kit has 61 MB and may have 55: the largest file is b.whl with 60"


def test_a_wheel_of_other_sources_is_noticed(tmp_path: Path) -> None:
    for name, text in (("checkpointless/a.py", "a = 1\n"), ("callbacks/b.py", "b = 1\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    wheel = tmp_path / "checkpointless-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("checkpointless/a.py", "a = 1\n")
        archive.writestr("checkpointless/callbacks/b.py", "b = 1\n")
        archive.writestr(
            "checkpointless-0.1.0.dist-info/METADATA", "Name: checkpointless\nRequires-Dist: torch>=2.6\n"
        )
    assert differing(wheel, tmp_path) == []
    assert required_by(wheel) == ["torch>=2.6"]
    (tmp_path / "callbacks" / "b.py").write_text("b = 2\n")
    (tmp_path / "checkpointless" / "c.py").write_text("")
    assert differing(wheel, tmp_path) == ["checkpointless/c.py", "checkpointless/callbacks/b.py"]


@pytest.mark.parametrize(
    ("wheel", "expected"),
    [
        ("numpy-1.26.4-cp312-cp312-manylinux_2_17_x86_64.whl", True),
        ("numpy-1.26.4-cp311-cp311-manylinux_2_17_x86_64.whl", False),
        ("psutil-7.2.2-cp36-abi3-manylinux2010_x86_64.whl", True),
        ("pytest-9.2.0-py3-none-any.whl", True),
    ],
)
def test_a_wheel_of_another_python_is_noticed(wheel: str, expected: bool) -> None:
    assert fits(wheel, (3, 12)) is expected


def test_a_wheel_is_unpacked_without_its_scripts(tmp_path: Path) -> None:
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/b.py", "b = 1")
        archive.writestr("a-1.data/purelib/c.py", "c = 1")
        archive.writestr("a-1.data/scripts/d", "d")
        archive.writestr("tests/test_a.py", "")
    unpack(wheel, tmp_path / "site")
    found = {
        path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*") if path.is_file()
    }
    assert found == {"a/b.py", "c.py"}
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("../outside.py", "")
    with pytest.raises(KitError, match=r"has a file outside of its folder: \.\./outside\.py"):
        unpack(wheel, tmp_path / "site")


@pytest.mark.long
def test_the_kit_is_made_from_the_package_index(tmp_path: Path) -> None:
    wheels = {each.name for each in kit.make(tmp_path / "kit", "3.12", 0)}
    assert any(name.startswith("megatron_core-0.15") and "cp312" in name for name in wheels)
    (ours,) = [name for name in wheels if name.startswith("checkpointless-")]
    assert differing(tmp_path / "kit" / ours, ROOT) == []
