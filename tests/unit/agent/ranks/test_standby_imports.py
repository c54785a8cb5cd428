"""Test what a standby in an interpreter of its own imports, and with which environment it may be used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpointless.agent.ranks.rank_process import Script
from checkpointless.agent.ranks.standbys.interpreters import ASSIGNED, InterpreterStandbys, StandbyProgram
from checkpointless.agent.ranks.standbys.process import CudaGuard, spoiling_import
from checkpointless.coordinator.rendezvous import Rendezvous
from tests.unit.doctor.test_forking import fake_driver

SETS_UP = "import torch\ntry:\n    torch.cuda.init()\nexcept Exception:\n    pass\n"


@pytest.fixture
def script(tmp_path: Path) -> Script:
    (tmp_path / "train.py").write_text("")
    return Script(str(tmp_path / "train.py"))


def test_an_import_that_would_set_up_cuda_is_found_although_it_hides_the_error(
    tmp_path: Path, script: Script
) -> None:
    (tmp_path / "standby_harmless.py").write_text("import torch\n")
    (tmp_path / "standby_outer.py").write_text("import standby_inner\n")
    (tmp_path / "standby_inner.py").write_text(SETS_UP)
    before = torch.cuda._lazy_init
    guard = CudaGuard()
    with guard.holding():
        assert spoiling_import(("standby_harmless", "standby_missing"), script, guard) is None
        assert spoiling_import(("standby_harmless", "standby_outer"), script, guard) == "standby_outer"
    assert torch.cuda._lazy_init is before


@pytest.mark.slow
@pytest.mark.parametrize(("primary", "name"), [(-1, None), (1, "starts")])
def test_a_context_that_torch_does_not_know_of_spoils_a_standby(
    tmp_path: Path, script: Script, primary: int, name: str | None
) -> None:
    """Having asked the driver for devices takes none of their memory."""
    library = fake_driver(tmp_path, primary)
    (tmp_path / "starts.py").write_text(f"import ctypes\nctypes.CDLL({str(library)!r}).cuInit(0)\n")
    code = (
        "from checkpointless.agent.ranks.rank_process import Script\n"
        "from checkpointless.agent.ranks.standbys.process import CudaGuard, spoiling_import\n"
        f"print(spoiling_import(('starts',), Script({script.target!r}), CudaGuard()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(name)


def test_whatever_the_coordinator_tells_a_rank_is_assigned() -> None:
    rendezvous = Rendezvous(nnodes=2, nproc=2)
    rendezvous.ask(0, 0)
    assert rendezvous.opened(0, 0, "10.0.0.1", 4000)
    assert rendezvous.rank_env(3, 1).keys() <= ASSIGNED


def test_no_standby_is_used_for_a_rank_with_other_variables_than_its_imports_had(
    tmp_path: Path, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    standbys = InterpreterStandbys(StandbyProgram(script, (), None, env, 2, None))
    rank = {"RANK": "0", "OMP_NUM_THREADS": "2"}
    assert standbys.take(rank, (0, 0, 0)) is None
    assert caplog.messages == []
    assert standbys.take({**rank, "CUDA_VISIBLE_DEVICES": "1"}, (0, 0, 0)) is None
    assert "['CUDA_VISIBLE_DEVICES'] of the rank is not what it was" in caplog.text
    standbys.close(5)


def test_a_standby_that_cannot_be_started_is_lost(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    standbys = InterpreterStandbys(StandbyProgram(script, (), None, dict(os.environ), 2, None))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    standbys.keep(1)
    (lost,) = standbys.news()
    assert lost.why == "it could not be started: No such file or directory"
    standbys.close(5)
