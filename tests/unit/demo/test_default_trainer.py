"""Test which trainer the demo takes if none is asked for."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from checkpointless.cli.command import UsageError
from checkpointless.cli.commands.demo import _demo_trainer
from checkpointless.testing.demo.trainers import TRAINERS


def test_the_demo_takes_nemo_where_it_is_and_else_ddp_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unasked, asked = argparse.Namespace(trainer=None), argparse.Namespace(trainer="nemo")
    monkeypatch.setitem(TRAINERS, "nemo", replace(TRAINERS["nemo"], needs=("torch",)))
    assert _demo_trainer(unasked) is _demo_trainer(asked) is TRAINERS["nemo"]
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(TRAINERS, "nemo", replace(TRAINERS["nemo"], needs=("no_such_module",)))
    assert _demo_trainer(unasked) is TRAINERS["ddp"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "no_such_module: pip install -e '.[nemo]' in a clone; what trains is --trainer ddp" in line
    with pytest.raises(UsageError, match=r"--trainer nemo needs no_such_module"):
        _demo_trainer(asked)
