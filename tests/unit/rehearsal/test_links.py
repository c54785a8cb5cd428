"""Test the working directory of a rehearsed job: it has what the user's has, and what is new stays in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checkpointless.testing.jobs import _linked_folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "home" / "project"
    (project / "package").mkdir(parents=True)
    (project / "package" / "module.py").write_text("X = 1")
    (project / "checkpoints").mkdir()
    (project / ".git").mkdir()
    (project.parent / "data").mkdir()
    (project.parent / "data" / "rows.bin").write_bytes(b"rows")
    return project


def test_relative_paths_lead_where_they_led(project: Path, tmp_path: Path) -> None:
    twin = _linked_folder(project, tmp_path / "jobs" / "1")
    assert (twin / "package" / "module.py").read_text() == "X = 1"
    assert (Path(os.path.normpath(twin / ".." / "data")) / "rows.bin").read_bytes() == b"rows"
    assert (twin / ".." / "data" / "rows.bin").read_bytes() == b"rows"
    assert (twin / ".git").is_symlink()


def test_what_is_new_is_not_in_the_users_folder(project: Path, tmp_path: Path) -> None:
    twin = _linked_folder(project, tmp_path / "jobs" / "1")
    (twin / "checkpoints" / "last.ckpt").write_text("state")
    (twin / "lightning_logs").mkdir()
    assert sorted(path.name for path in project.iterdir()) == [".git", "checkpoints", "package"]
    assert list((project / "checkpoints").iterdir()) == []


def test_a_job_within_the_folder_does_not_see_itself_without_end(project: Path) -> None:
    jobs = project / "runs" / "rehearsal"
    jobs.mkdir(parents=True)
    twin = _linked_folder(project, jobs / "1")
    assert (twin / "package" / "module.py").is_file()
    assert (twin / "runs").is_symlink()
