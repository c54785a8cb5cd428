"""Which descriptors are taken for connections of process groups."""

import os
from pathlib import Path

import pytest

from checkpointless.inprocess import gloo_sockets
from checkpointless.inprocess.gloo_sockets import GlooSockets


def test_a_number_that_a_file_has_taken_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "file").open("wb") as file:
        # As they were listed: the socket of that number was closed since.
        monkeypatch.setattr(gloo_sockets, "_sockets", lambda: {file.fileno(): 1})
        before = len(os.listdir("/proc/self/fd"))
        assert GlooSockets().shutdown() == 0
        assert len(os.listdir("/proc/self/fd")) == before
        assert file.write(b"still open") == 10
