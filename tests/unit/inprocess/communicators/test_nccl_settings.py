"""Test which variables of torch's and NCCL's a rank is given, and whose value counts."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from checkpointless.inprocess.communicators import process_groups
from checkpointless.inprocess.communicators.process_groups import _ProcessGroups
from checkpointless.system import nccl
from checkpointless.system.nccl import SETTINGS, apply, problem_of_version

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def test_what_nobody_has_set_is_set(caplog: pytest.LogCaptureFixture) -> None:
    environ: dict[str, str] = {}
    assert apply(environ) == ()
    assert environ == {name: setting.value for name, setting in SETTINGS.items()}
    assert apply(environ) == ()
    assert caplog.messages == []


@pytest.mark.parametrize("name", SETTINGS)
def test_a_users_own_value_counts_and_is_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    environ = {name: "3"}
    assert apply(environ) == (name,)
    assert environ[name] == "3"
    (said,) = caplog.messages
    assert said == f"{name}=3 is kept: {SETTINGS[name].otherwise}"


@pytest.mark.parametrize(("launcher", "kept"), [({"TORCHELASTIC_RUN_ID": "a"}, "0"), ({}, "1")])
def test_what_torchrun_gives_to_every_rank_is_no_users_wish(launcher: dict[str, str], kept: str) -> None:
    environ = {HANDLING: "1", **launcher}
    apply(environ)
    assert environ[HANDLING] == kept


@pytest.mark.parametrize("there", [True, False])
def test_groups_are_made_with_these_settings_where_there_is_nccl(
    there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl, "in_force", lambda: (2, 21, 5))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: there)
    for name in SETTINGS:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    groups = _ProcessGroups()
    groups.install()
    groups.uninstall()
    assert [os.environ.get(name) for name in SETTINGS] == (
        [setting.value for setting in SETTINGS.values()] if there else [None] * len(SETTINGS)
    )
    assert [text.startswith("NCCL 2.21.5: ") for text in caplog.messages] == [True] * there


@pytest.mark.parametrize(
    ("version", "is_fine"), [((2, 26, 2), True), ((2, 30), True), ((2, 26, 1), False), ((2, 9), False)]
)
def test_a_version_whose_aborts_may_deadlock_is_named(version: tuple[int, ...], is_fine: bool) -> None:
    assert (problem_of_version(version) is None) is is_fine


@pytest.mark.parametrize(
    ("version", "users", "said"),
    [("2.13.0", None, 0), ("2.15.0+cu132", None, 1), ("3.0", None, 1), ("2.15.0", "0", 0)],
)
def test_nccl_means_what_it_meant_before_torch_2_15(
    version: str, users: str | None, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", process_groups.__name__)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for name in SETTINGS:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    if users is not None:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", users)
    process_groups._prepare_nccl()
    assert os.environ["TORCH_DIST_USE_NCCL2"] == "0"
    assert [text.startswith("nccl means torch's former") for text in caplog.messages] == [True] * said
