"""Test that the CPU platform is found by its name, and that one that cannot be used is said in one line."""

import pkgutil

import pytest

from checkpointless.launcher.agent.ranks import preload
from checkpointless.launcher.agent.ranks.preload import (
    CPU,
    GROUP,
    PlatformMissingError,
    find_platform,
    install_platform,
)

PROJECT = Path(__file__).parents[4] / "pyproject.toml"

called: list[str] = []


def note_the_call() -> None:
    """Note the call; a platform's entry point may name this function."""
    called.append("here")


def test_the_cpu_platform_is_installed_as_the_project_says() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    declared = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][GROUP]
    assert find_platform(CPU).value == declared[CPU]


def test_a_platform_is_loaded_and_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", f"{__name__}:note_the_call", GROUP)
    monkeypatch.setattr(preload, "entry_points", lambda group, name: [entry] if name == "mine" else [])
    called.clear()
    install_platform("mine")
    assert called == ["here"]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("checkpointless.of_an_older_version:install", "ModuleNotFoundError: No module named"),
        (f"{__name__}:no_such_function", "AttributeError: module"),
        (f"{__name__}:fail", "ValueError: two lines"),
    ],
)
def test_an_entry_point_that_cannot_be_used_is_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch, value: str, why: str
) -> None:
    entry = EntryPoint(CPU, value, GROUP)
    monkeypatch.setattr(preload, "entry_points", lambda group, name: [entry])
    with pytest.raises(PlatformMissingError) as refused:
        install_platform(CPU)
    said = str(refused.value)
    assert said.startswith(f"the entry point cpu = {value} in {GROUP} cannot be used: {why}")
    assert "install checkpointless again" in said
    assert "\n" not in said


def fail() -> None:
    raise ValueError("two\nlines")


def test_the_cpu_platform_is_where_it_is_looked_for() -> None:
    from checkpointless.integrations.megatron import cpu_platform

    assert pkgutil.resolve_name(preload._CPU_PLATFORM) is cpu_platform.install


def test_a_platform_that_cannot_be_used_is_one_line_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "_CPU_PLATFORM", f"{__name__}:fail")
    with pytest.raises(PlatformError) as refused:
        install_cpu_platform()
    assert str(refused.value) == "the CPU platform cannot be used: ValueError: two lines"
