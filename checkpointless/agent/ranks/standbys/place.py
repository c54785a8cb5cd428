"""The place of a rank: what a process needs to become one, and how a standby waits for it and takes it."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from checkpointless.agent.ranks.rank_process import Script, run_script
from checkpointless.environment import AGENT_FD_ENV, BOARD_FD_ENV, RANK_ENV
from checkpointless.posix import temp_folder
from checkpointless.posix.background import first_to_go, private_bytes

MAX_REQUEST_BYTES = 128 * 1024
PING, READY, SPOILED, ASSIGN = "ping", "ready", "spoiled", "assign"


@dataclass(frozen=True)
class Place:
    """The place of a rank.

    Attributes:
        env: environment variables of the rank, on top of those of the process.
        log: descriptor that its output goes to.
        agent: descriptor of its connection to the agent.
        board: descriptor of its board.
    """

    env: dict[str, str]
    log: int
    agent: int
    board: int


def become_rank(place: Place, script: Script, folder: Path | None) -> NoReturn:
    """Run the script as a rank, in a process that has imported what it needs.

    Args:
        folder: folder in which the rank keeps its sockets (:mod:`checkpointless.posix.temp_folder`).
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what was printed before belongs to the log of before
    os.dup2(place.log, 1)
    os.dup2(place.log, 2)
    os.close(place.log)
    os.environ.update(place.env)
    os.environ[AGENT_FD_ENV] = str(place.agent)
    os.environ[BOARD_FD_ENV] = str(place.board)
    _tell_rank(int(place.env[RANK_ENV]))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # a fresh interpreter's state differs from rank to rank
    logging.getLogger().handlers.clear()  # those of the process that it was
    temp_folder.use(folder)
    run_script(script)


def wait_for_place(connection: socket.socket) -> Place:
    """Say that this process is ready, and wait until it is given a place; it ends if it is not needed any more."""
    say(connection, READY, private_bytes=private_bytes())
    with first_to_go(), connection:
        while True:
            data, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
            if not data:
                os._exit(0)
            request = json.loads(data)
            if request["type"] == ASSIGN:
                return Place(request["env"], *descriptors)
            say(connection, PING)


def say(connection: socket.socket, what: str, **fields: Any) -> None:
    """Tell the process that keeps this standby something; end if it is gone."""
    try:
        connection.send(json.dumps({"type": what, **fields}).encode())
    except OSError:
        os._exit(0)


def _tell_rank(rank: int) -> None:
    """Tell Lightning the rank: it notes the rank when it is imported, and no rank was known then."""
    module = sys.modules.get("lightning_utilities.core.rank_zero")
    if module is not None:
        module.rank_zero_only.rank = rank
