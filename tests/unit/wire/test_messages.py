"""Test messages between rank and agent: what one side says the other reads, and nothing else gets through."""

import json
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.causes import Cause, exception_cause
from checkpointless.launcher.protocol.channel import Challenge, check_version
from checkpointless.launcher.protocol.messages import MAX_MESSAGE_BYTES, Barrier, Message, ProtocolError, encode

st.register_type_strategy(int, st.integers(-(1 << 63), (1 << 63) - 1))


def made_up(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for any message of a class, or for any part of one."""
    known = get_type_hints(cls)
    return st.builds(cls, **{name: value_of(known[name]) for name in cls.__struct_fields__})


def value_of(hint: Any) -> st.SearchStrategy[Any]:
    return made_up(hint) if hint in (Cause, messages.Answer) else st.from_type(hint)


FROM_RANK = st.one_of(*map(made_up, get_args(messages.RankMessage)))
FROM_AGENT = st.one_of(*map(made_up, get_args(messages.AgentMessage)))
FROM_A_NODE = st.one_of(
    *(made_up(c) for c in get_args(messages.NodeMessage) if c not in (messages.Standing, messages.Silent))
)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


SAID = ((messages.FROM_RANK, FROM_RANK), (messages.FROM_AGENT, FROM_AGENT), (messages.FROM_NODE, FROM_A_NODE))


@given(st.one_of(*(st.tuples(st.just(vocabulary), said) for vocabulary, said in SAID)))
def test_what_one_side_says_the_other_reads(said: tuple[messages.Vocabulary, Message]) -> None:
    vocabulary, message = said
    line = encode(message)
    assert line.count(b"\n") == 1
    assert vocabulary.decode(line) == message


@given(st.binary(max_size=200))
def test_noise_is_refused(line: bytes) -> None:
    for vocabulary, _ in SAID:
        with pytest.raises(ProtocolError):
            vocabulary.decode(line)


@given(FROM_RANK, st.data())
def test_a_field_of_another_type_is_refused(message: Message, data: st.DataObject) -> None:
    body: dict[str, Any] = json.loads(encode(message))
    name = data.draw(st.sampled_from(sorted(body)))
    body[name] = data.draw(ANY_JSON.filter(lambda value: type(value) is not type(body[name])))
    with pytest.raises(ProtocolError):
        messages.FROM_RANK.decode(json.dumps(body).encode())


CAUSE = exception_cause(3, "ValueError", "no", "Traceback", 7, victim=True)
STANDING = messages.RankStanding(3, 1, messages.RankState.LEAVING, 6, 7)
ROWS: list[Message] = [
    messages.FaultReport(1, CAUSE, committed=6, making=7),
    messages.Standing(1, 2, 6, "a run", False, [STANDING]),
    messages.Silent([messages.SilentRank(3, 9, 1500, 1500, 7, True, ord("S"), 20)]),
]


@pytest.mark.parametrize(
    ("message", "old", "new"),
    [
        (Barrier(1), b'"barrier"', b'"go"'),
        (Barrier(1), b'"generation":1', b'"generation":true'),
        (Barrier(1), b'"generation":1', b'"generation":1.0'),
        (Barrier(1), b'"generation":1', b'"generation":%d' % (1 << 63)),
        (Barrier(1), b'"generation":1', b'"generation":%d' % (-(1 << 63) - 1)),
        (Barrier(1), b'"generation":1', b'"generation":1,"more":1'),
        (ROWS[0], b'"victim"', b'"guilty"'),
        (ROWS[1], b'"leaving"', b'"away"'),
        (ROWS[1], b'"leaving"', b"-1"),
        (ROWS[1], b",6,7]]", b",6]]"),
        (ROWS[1], b",6,7]]", b",6,7,8]]"),
        (ROWS[2], b"true", b"1"),
        (ROWS[2], str(ord("S")).encode(), b"128"),
    ],
)
def test_what_is_not_as_agreed_is_refused(message: Message, old: bytes, new: bytes) -> None:
    line = encode(message)
    assert line.count(old) == 1
    assert messages.FROM_NODE.decode(line) == message
    with pytest.raises(ProtocolError):
        messages.FROM_NODE.decode(line.replace(old, new))


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"barrier","unfit":"\xff"}',
        b'{"type":"\xff"}',
        b'{"type":' + b"9" * 9999 + b"}",
        b'{"type": "barrier"}',
        b"[" * 200_000,
        encode(messages.GiveUp(1, "x"))[:-1] + b" " * MAX_MESSAGE_BYTES,
        encode(messages.FaultNotice(3, "1", "no", 2)),  # the agent's, and not the rank's
    ],
)
def test_a_line_that_is_no_message_of_a_rank_is_refused_in_short(line: bytes) -> None:
    with pytest.raises(ProtocolError) as raised:
        messages.FROM_RANK.decode(line)
    assert len(str(raised.value)) < 200


def test_a_text_of_a_class_of_its_own_is_a_text() -> None:
    class Text(str):
        """Stands in for what a user's exception may return for its text."""

    report = messages.FaultReport(
        1, exception_cause(2, "ValueError", Text("no"), Text("Traceback"), 4, victim=False)
    )
    assert messages.FROM_RANK.decode(encode(report)) == report
    long = encode(messages.GiveUp(1, Text("x" * MAX_MESSAGE_BYTES)))
    assert len(long) <= MAX_MESSAGE_BYTES
    assert messages.FROM_RANK.decode(encode(messages.GiveUp(1, Text("no file \udcff")))).reason == "no file \\udcff"  # type: ignore[attr-defined]


@pytest.mark.parametrize("character", ["a", "\n", "\u00e9", "\U0001f525"])
def test_a_long_traceback_keeps_its_two_ends(character: str) -> None:
    trace = "Traceback, first line" + character * 1_000_000 + "the last line"
    report = messages.FaultReport(1, exception_cause(2, "ValueError", "the message", trace, 4, victim=False))
    line = encode(report)
    assert len(line) <= MAX_MESSAGE_BYTES
    read = messages.FROM_RANK.decode(line)
    assert isinstance(read, messages.FaultReport)
    assert read.cause.traceback.startswith("Traceback, first line")
    assert read.cause.traceback.endswith("the last line")
    assert msgspec.structs.replace(read.cause, traceback=trace) == report.cause


@given(st.lists(FROM_RANK, max_size=4), st.integers(1, 50))
def test_lines_survive_being_cut_anywhere(said: list[Message], piece: int) -> None:
    stream = b"".join(encode(message) for message in said)
    buffer = messages.LineBuffer()
    lines = [line for at in range(0, len(stream), piece) for line in buffer.feed(stream[at : at + piece])]
    assert [messages.FROM_RANK.decode(line) for line in lines] == said


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory() -> None:
    buffer = messages.LineBuffer()
    assert buffer.feed(b"x" * MAX_MESSAGE_BYTES) == []
    with pytest.raises(ProtocolError):
        buffer.feed(b"x")


def test_another_version_of_the_protocol_is_refused_with_what_to_do() -> None:
    check_version(Challenge("nonce").version)
    with pytest.raises(ValueError, match=r"version 1 of .*install the same checkpointless on all nodes"):
        check_version(1)
