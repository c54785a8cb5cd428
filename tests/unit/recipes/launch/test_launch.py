"""Test all of recipes/launch: scripts are clean, options exist, no token is shown, everything is packaged."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointless.cli import command_line
from checkpointless.launcher.protocol.channel import MIN_TOKEN_CHARACTERS
from checkpointless.system.environment import TOKEN_ENV
from tests.unit.recipes.launch.batch import run_sbatch
from tests.unit.recipes.launch.manifests import LAUNCH, POD_FILES, SBATCH, container_of, script_of
from tests.unit.recipes.launch.pod import run_pod


@pytest.mark.slow
def test_the_token_is_in_no_command_line(tmp_path: Path, bin_dir: Path) -> None:
    run_sbatch(tmp_path)
    token = (tmp_path / "token").read_text()
    assert len(token) >= MIN_TOKEN_CHARACTERS
    for seen in (tmp_path / "srun", tmp_path / "coordinated", *tmp_path.glob("argv-*")):
        assert token not in seen.read_text()
    run_pod(tmp_path, 1)
    assert "t" * 32 not in (tmp_path / "argv-1").read_text()
    for name in POD_FILES:
        for job in ("coordinator", "node"):
            container = container_of(name, job)
            assert TOKEN_ENV not in " ".join([*container["command"], *container.get("args", [])])


def test_every_shell_script_is_clean(tmp_path: Path) -> None:
    pod, coordinator = tmp_path / "pod.sh", tmp_path / "coordinator.sh"
    pod.write_text("#!/bin/bash\n" + script_of("jobset.yaml"))
    coordinator.write_text("#!/bin/bash\n" + script_of("jobset.yaml", "coordinator"))
    (node,) = re.findall(r"^node='\n(.*?)^'$", SBATCH.read_text(), re.M | re.S)
    task = tmp_path / "task.sh"
    task.write_text("#!/bin/bash\n" + node)
    shellcheck = Path(sys.executable).parent / "shellcheck"
    for script in (SBATCH, pod, coordinator, task):
        for checker in (["bash", "-n"], [str(shellcheck)]):
            checked = subprocess.run([*checker, str(script)], capture_output=True, text=True)
            assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("run", {"--nnodes", "--node-rank", "--rdzv-endpoint", "--spares", "--run-dir"}),
        ("coordinator", {"--nnodes", "--nproc-per-node", "--rdzv-endpoint", "--run-dir"}),
    ],
)
def test_every_option_is_known(command: str, needed: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main([command, "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    for path in (SBATCH, *(LAUNCH / name for name in POD_FILES)):
        (call,) = re.findall(rf"checkpointless {command} ((?:.*\\\n)*.*)", path.read_text())
        used = set(re.findall(r"(?<!\S)--[a-z-]+", call))
        assert needed <= used <= known
