"""Test the agent's connection to a rank: it reads what is there, and never waits."""

import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from checkpointless.launcher.agent.ranks.process_keeper import LocalRank
from checkpointless.launcher.protocol.messages import Barrier, Finish, Hello, ProtocolError, encode


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[LocalRank, socket.socket]]:
    """Give a rank and its process's end of the connection."""
    ours, theirs = socket.socketpair()
    with selectors.DefaultSelector() as selector, theirs:
        rank = LocalRank(0, cast(Any, None), cast(Any, None))
        rank.connect(ours, selector, lambda: None)
        yield rank, theirs
        rank.disconnect()


def test_messages_are_given_out_when_they_are_complete(pair: tuple[LocalRank, socket.socket]) -> None:
    rank, process = pair
    assert rank.receive() is None
    line = encode(Hello(0)) + encode(Barrier(3))
    process.sendall(line[:-5])
    assert (rank.receive(), rank.receive()) == ([Hello(0)], None)
    process.sendall(line[-5:])
    process.close()
    assert rank.receive() == [Barrier(3)], "what was said before the end"
    with pytest.raises(EOFError):
        rank.receive()
    assert not rank.send(Finish())


def test_what_is_no_message_is_refused(pair: tuple[LocalRank, socket.socket]) -> None:
    rank, process = pair
    process.sendall(b"good morning\n")
    with pytest.raises(ProtocolError):
        rank.receive()


def test_a_rank_that_reads_nothing_blocks_nobody(pair: tuple[LocalRank, socket.socket]) -> None:
    while pair[0].send(Finish()):
        pass
