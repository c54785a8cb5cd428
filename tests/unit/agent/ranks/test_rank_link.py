"""Test the agent's connection to a rank: it reads what is there, and never waits."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator

import pytest

from checkpointless.launcher.agent.ranks.process_keeper import _RankLink
from checkpointless.launcher.protocol.messages import Barrier, Finish, Hello, ProtocolError, encode


class Pair:
    """Represents a link and the rank's end of its connection."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        ours, self.rank = socket.socketpair()
        self.heard = 0
        self.link = _RankLink(0, ours, self.selector, self._hear)

    def _hear(self) -> None:
        self.heard += 1

    def turn(self) -> None:
        """Make one turn of the loop."""
        for key, _ in self.selector.select(0):
            key.data()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.rank.close()
    made.selector.close()


def test_messages_are_given_out_when_they_are_complete(pair: Pair) -> None:
    assert pair.link.receive() is None
    line = encode(Hello(0)) + encode(Barrier(0))
    pair.rank.sendall(line[:-5])
    pair.turn()
    assert pair.heard == 1
    assert pair.link.receive() == [Hello(0)]
    assert pair.link.receive() is None
    pair.rank.sendall(line[-5:])
    assert pair.link.receive() == [Barrier(0)]


def test_what_was_said_before_the_end_is_heard(pair: Pair) -> None:
    pair.rank.sendall(encode(Barrier(3)))
    pair.rank.close()
    assert pair.link.receive() == [Barrier(3)]
    with pytest.raises(EOFError):
        pair.link.receive()
    assert not pair.link.send(Finish())


def test_what_is_no_message_is_refused(pair: Pair) -> None:
    pair.rank.sendall(b"good morning\n")
    with pytest.raises(ProtocolError):
        pair.link.receive()


def test_a_rank_that_reads_nothing_blocks_nobody(pair: Pair) -> None:
    while pair.link.send(Finish()):
        pass
