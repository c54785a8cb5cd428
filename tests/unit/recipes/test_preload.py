"""Test what is imported once for all ranks of a recipe: what a new rank imports, the others wait for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hydra", reason="recipes need hydra-core")

from omegaconf import OmegaConf

from checkpointless.recipes.settings import RECIPE_PRELOAD, preloads_of


def test_what_a_recipe_names_is_preloaded_unless_it_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("raise RuntimeError('local modules are not for the zygote')")
    monkeypatch.chdir(tmp_path)
    callbacks = [{"_target_": "mine.Clock"}, {"_target_": "torch.nn.Linear", "path": "torch.data"}]
    config = OmegaConf.create(
        {
            "model": {"config": {"spec": {"_target_": "hydra.utils.get_method", "path": "json.dumps"}}},
            "c": callbacks,
        }
    )
    assert preloads_of(config) == (*RECIPE_PRELOAD, "hydra.utils.get_method", "torch.nn.Linear")


@pytest.mark.long  # it imports NeMo anew
@pytest.mark.nemo
def test_the_objects_of_a_recipe_import_nothing_more() -> None:
    code = (
        "import sys\n"
        "from checkpointless.launcher.agent.ranks.preload import preload\n"
        "from checkpointless.recipes.settings import preloads_of\n"
        "from checkpointless.recipes import runner, settings\n"
        "config = settings.load('tiny_gpt_cpu')\n"
        "assert preload(preloads_of(config)) == []\n"
        "before = set(sys.modules)\n"
        "runner.prepare_process()\n"
        "runner._objects(runner._completed(config))\n"
        "more = {name for name in set(sys.modules) - before if not name.startswith('omegaconf.')}\n"
        "assert not more, more\n"
    )
    environment = {"CHECKPOINTLESS_CPU": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, env={**os.environ, **environment})
