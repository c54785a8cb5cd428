"""Test what the zygote has imported before it forks."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from checkpointless.launcher.agent.ranks.preload import preload, preloads_of, prepare
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


@pytest.mark.long
@pytest.mark.slow
def test_a_first_optimizer_imports_nothing_more(tmp_path: Path) -> None:
    """Else a rank that takes another's place would import for seconds, while the others wait for it."""
    script = tmp_path / "train.py"
    script.write_text("import torch")
    code = (
        "import sys\n"
        "from checkpointless.launcher.agent.ranks.preload import preload, preloads_of, prepare\n"
        "from checkpointless.launcher.agent.ranks.rank_process import Script\n"
        f"script = Script({str(script)!r})\n"
        "assert preload(preloads_of(script), script) == []\n"
        "import torch\n"
        "before = set(sys.modules)\n"
        "torch.optim.AdamW(torch.nn.Linear(2, 1).parameters())\n"
        "assert set(sys.modules) == before\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


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


def test_what_cannot_be_preloaded_is_left_to_the_script() -> None:
    assert preload(("json.decoder", "nowhere_to_be_found")) == ["nowhere_to_be_found"]


def test_a_script_goes_through_a_command_line() -> None:
    script = Script("a b.py", ("--x", "ü", ""), module=True)
    assert Script.from_json(script.to_json()) == script


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


def test_what_cannot_be_done_before_the_ranks_is_left_to_them(
    preloaded: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(Script(preloaded.__name__, module=True))  # it has nothing to prepare
    preloaded.before_ranks = lambda arguments: arguments[0]  # type: ignore[attr-defined]
    prepare(Script(preloaded.__name__, module=True))
    assert "preparing made_up_runner failed: IndexError" in caplog.text
