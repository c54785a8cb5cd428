"""Test faults of a script's own, beside those that the job was launched with, and without a wrapper."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from checkpointless.callbacks import HPFaultInjectionCallback
from checkpointless.faults.inject import FaultInjector, InjectedFault
from checkpointless.faults.ledger import fired
from checkpointless.inprocess.wrap import HPCallWrapper
from checkpointless.system.environment import FAULTS_ENV, RANK_ENV, RUN_DIR_ENV
from tests.unit.inprocess.test_interruptions import a_call

pytestmark = pytest.mark.lightning

MINE = "exception@between:rank=0,step=2"
JOBS = "exception@forward:rank=0,step=1"


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path))
    monkeypatch.setenv(RANK_ENV, "0")
    monkeypatch.delenv(FAULTS_ENV, raising=False)
    return tmp_path


@pytest.fixture
def call() -> Iterator[HPCallWrapper]:
    with a_call() as made:
        yield made


def test_a_plain_trainer_has_the_faults_of_its_callback(run_dir: Path) -> None:
    trainer = pl.Trainer(
        max_steps=5, accelerator="cpu", callbacks=[HPFaultInjectionCallback([MINE])], barebones=True
    )
    with pytest.raises(InjectedFault):
        trainer.fit(BoringModel(), torch.utils.data.DataLoader(torch.ones(8, 32), batch_size=1))  # type: ignore[arg-type]
    assert trainer.global_step == 2
    assert fired(run_dir) == {MINE: 1}


def test_a_scripts_faults_come_at_the_phases_of_the_wrapper(call: HPCallWrapper, run_dir: Path) -> None:
    callback = HPFaultInjectionCallback([MINE])
    assert call.faults is callback.injector
    assert HPFaultInjectionCallback.from_environment() is None, "the job was launched with no faults"
    with pytest.raises(InjectedFault):
        call.enter_phase("between", 2)
    assert fired(run_dir) == {MINE: 1}


def test_the_jobs_faults_stay_and_their_callback_has_the_same_injector(
    call: HPCallWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULTS_ENV, json.dumps([JOBS]))
    call.faults = jobs = FaultInjector.from_environment(0)
    HPFaultInjectionCallback([MINE])
    assert call.faults is jobs
    callback: Any = HPFaultInjectionCallback.from_environment()
    assert callback.injector is jobs
