"""Test a connection in a loop: whoever sends is never called back, and a dead peer is noticed once."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from checkpointless.launcher.protocol import channel as channel_module
from checkpointless.launcher.protocol.channel import Channel
from checkpointless.launcher.protocol.messages import FROM_NODE, Alive, GiveUp, encode


class End:
    """Holds one end of a pair as a channel; the other is a plain socket."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        ours, self.peer = socket.socketpair()
        self.heard: list[Any] = []
        self.closed: list[str] = []
        self.channel = Channel(
            ours, selector, hears=FROM_NODE, on_message=self.heard.append, on_close=self.closed.append
        )


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made


def turn(selector: selectors.BaseSelector) -> None:
    """Make one turn of the loop: handle every event of one ``select``, as ``serve`` does."""
    for key, _ in selector.select(0.2):
        key.data()


def test_a_send_that_fails_says_so_in_the_next_turn_and_once(selector: selectors.BaseSelector) -> None:
    end = End(selector)
    end.peer.close()
    end.channel.send(Alive())
    end.channel.send(Alive())
    assert end.closed == [], "the sender may be in the middle of telling others something"
    for _ in range(3):
        turn(selector)
    assert len(end.closed) == 1
    assert not selector.get_map()
    end.channel.send(Alive())
    end.channel.close()
    assert len(end.closed) == 1


@pytest.mark.parametrize(("act", "told"), [("send", 1), ("close", 0)])
def test_a_peer_that_dies_in_one_turn_is_no_harm(selector: selectors.BaseSelector, act: str, told: int) -> None:
    """Both events are of one turn; hearing the first makes the loop send to, or close, the second."""
    first, second = End(selector), End(selector)

    def hear(_: Any) -> None:
        if act == "send":
            second.channel.send(Alive())
        else:
            second.channel.close()

    first.channel.on_message = hear
    while not second.channel._waiting:  # it sends more than the peer takes
        second.channel.send(GiveUp(-1, "x" * 50_000))
    first.peer.sendall(encode(Alive()))
    second.peer.close()
    for _ in range(4):
        turn(selector)
    assert (len(second.closed), first.closed) == (told, [])
    first.channel.close()
    assert not selector.get_map()


def test_who_takes_nothing_is_given_up(selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_WAITING_BYTES", 1_000_000)
    end = End(selector)
    for _ in range(100):
        end.channel.send(GiveUp(-1, "x" * 50_000))
    turn(selector)
    assert "it has not taken" in end.closed[0]


@pytest.mark.parametrize("noise", [b"\xff\xfe\n", b"{}\n", b"x" * (2 << 20)])
def test_who_does_not_keep_to_the_protocol_is_cut_off(selector: selectors.BaseSelector, noise: bytes) -> None:
    end = End(selector)
    end.peer.setblocking(False)
    while noise and not end.closed:
        try:
            noise = noise[end.peer.send(noise) :]
        except OSError:
            break
        turn(selector)
    for _ in range(3):
        turn(selector)
    assert "protocol" in end.closed[0]
