"""Test what the zygote has imported before it forks."""

import pkgutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from checkpointless.launcher.agent.ranks import preload
from checkpointless.launcher.agent.ranks.preload import PlatformError, install_cpu_platform, preloads_of, prepare
from checkpointless.launcher.agent.ranks.rank_process import Script


def test_installed_modules_are_preloaded_and_the_users_own_are_not(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise RuntimeError('local modules are not for the zygote')")
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch.nn as nn\nimport mine, nowhere_to_be_found\nfrom . import sibling\n"
        "from lightning.pytorch import Trainer\n"
        "def main():\n    from checkpointless.inprocess import HPWrapper\n"
    )
    assert preloads_of(Script(str(script))) == (
        "checkpointless.inprocess.HPWrapper",
        "lightning.pytorch.Trainer",
        "torch._dynamo",
        "torch.distributed.tensor.debug",
        "torch.nn",
    )


def test_a_local_module_hides_an_installed_one(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    script = tmp_path / "train.py"
    script.write_text("import torch")
    assert preloads_of(Script(str(script))) == ()


@pytest.mark.parametrize("source", ["def broken(:", "\0", "\xff"])
def test_a_script_that_cannot_be_parsed_preloads_nothing(tmp_path: Path, source: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(source, encoding="latin-1")
    assert preloads_of(Script(str(script))) == ()


def test_an_import_whose_error_has_no_words_is_left_to_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "speechless.py").write_text(
        "class Odd(Exception):\n    def __str__(self):\n        raise RuntimeError\nraise Odd\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert preload.preload(("speechless", "wave")) == {"speechless": "preloading speechless failed: Odd"}


@pytest.fixture
def preloaded(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module that is preloaded, and that a job runs as its script."""
    module = ModuleType("made_up_runner")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_preloaded_script_does_once_what_every_rank_would_do(preloaded: ModuleType) -> None:
    asked: list[tuple[str, ...]] = []
    preloaded.before_ranks = asked.append  # type: ignore[attr-defined]
    prepare(Script(preloaded.__name__, ("recipe", "a=1"), module=True))
    prepare(Script(preloaded.__name__, ("no module",)))
    assert asked == [("recipe", "a=1")]


def test_what_fails_before_ranks_is_left_to_them(preloaded: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    prepare(Script(preloaded.__name__, module=True))  # it has nothing to prepare
    preloaded.before_ranks = lambda arguments: arguments[0]  # type: ignore[attr-defined]
    prepare(Script(preloaded.__name__, module=True))
    assert "preparing made_up_runner failed: IndexError" in caplog.text


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
