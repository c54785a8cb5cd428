"""Test that the CPU platform is found by its name, and that one that cannot be used is said in one line."""

import pkgutil

import pytest

from checkpointless.launcher.agent.ranks import preload
from checkpointless.launcher.agent.ranks.preload import PlatformError, install_cpu_platform


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
