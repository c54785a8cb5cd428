"""Test strangers at the coordinator's port while a job trains: nothing is let in, and nobody else notices."""

import itertools
import json
import random
import socket
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointless.launcher.protocol.channel import Challenge
from checkpointless.launcher.protocol.messages import encode
from tests.ranks.test_agent_nodes import Nodes, replaced
from tests.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

VISITS = 1000
Visit = Callable[[socket.socket, random.Random], None]


def says_nothing(connection: socket.socket, draws: random.Random) -> None:
    """Send nothing."""


def noise(connection: socket.socket, draws: random.Random) -> None:
    connection.sendall(draws.randbytes(draws.randint(1, 4096)))


def endless_line(connection: socket.socket, draws: random.Random) -> None:
    connection.sendall(b"x" * (512 * 1024))


def a_browser(connection: socket.socket, draws: random.Random) -> None:
    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: node0\r\n\r\n")


def wrong_messages(connection: socket.socket, draws: random.Random) -> None:
    lines = [b"{}", b"[]", b'{"type":"joined"}', b'{"version":99,"type":"proof"}', b"[" * 5000, b"\xff\xfe"]
    connection.sendall(b"\n".join(draws.sample(lines, 3)) + b"\n")


def commands(connection: socket.socket, draws: random.Random) -> None:
    """Speak as a node or as the coordinator, without having proved anything."""
    over = {"v": 1, "type": "over", "reason": "because I say so"}
    end = {"v": 1, "type": "end", "code": 0, "last_words": []}
    connection.sendall("".join(json.dumps(each) + "\n" for each in (over, end)).encode())


def wrong_token(connection: socket.socket, draws: random.Random) -> None:
    answers = connection.makefile()
    proof = Challenge(json.loads(answers.readline())["nonce"]).prove("a token that somebody has guessed", 1, 2)
    connection.sendall(encode(proof))
    assert answers.read() == "", "the coordinator closes the connection and says no more"


KINDS: tuple[Visit, ...] = (says_nothing, noise, endless_line, a_browser, wrong_messages, commands, wrong_token)


def test_a_thousand_strangers_while_training(tmp_path: Path) -> None:
    faults = ("3:120:0:SIGKILL", "1:200:1:gate")
    nodes = Nodes(tmp_path, 2, *faults, extra_env={"STEPS": "250"})
    wait_until(lambda: nodes.committed(0, 10))
    draws = random.Random(0)
    held = []
    for number in range(VISITS):
        connection = socket.create_connection(("127.0.0.1", nodes.port), timeout=60)
        try:
            KINDS[number % len(KINDS)](connection, draws)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the coordinator has turned it away already
        if number % 10 == 0:
            held.append(connection)  # this one says no more
        else:
            connection.close()
    nodes.open_gate()
    first, _ = nodes.end()
    for connection in held:
        connection.close()
    assert "incident 1: rank 3 killed by SIGKILL at step 120" in first.err
    assert "incident 2" not in first.err
    assert replaced(nodes) == {3: 1}
    times = [note["mono"] for note in nodes.notes("step", 0)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    print(f"steps: median {statistics.median(gaps) * 1e3:.1f} ms, longest {max(gaps) * 1e3:.0f} ms")
    assert max(gaps) < 5.0, "somebody kept the job waiting"
