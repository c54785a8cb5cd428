"""Test figures and foreign text in words for people."""

from hypothesis import given
from hypothesis import strategies as st

from checkpointless.cli.tables import _share
from checkpointless.observability.telemetry.wording import duration, numbered, plural, printable, size


def test_figures_read_well() -> None:
    said = [duration(s) for s in (None, 0.0, 0.0001, 0.0123, 1.268, 59.96)]
    assert said == ["unknown", "0 s", "<1 ms", "12 ms", "1.27 s", "60.0 s"]
    said = [duration(s) for s in (369.2, 900, 3599.7, 86_399, 100_000)]
    assert said == ["6 min 9 s", "15 min", "1 h", "1 d", "1 d 4 h"]
    assert [size(n) for n in (0, 999, 1_629_284, 5 * 10**18)] == ["0 B", "999 B", "1.63 MB", "5000 PB"]
    assert [_share(x) for x in (None, 0.5, 0.9996, 1.0)] == ["unknown", "50.0 %", "99.96 %", "100.0 %"]
    said = [numbered("rank", numbers) for numbers in ((), (3,), (5, 0, 1, 2))]
    assert said == ["no rank", "rank 3", "ranks 0-2, 5"]
    assert numbered("node", range(0, 40, 2)) == "nodes 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"
    assert plural(1, "line") + plural(2, "line") == "1 line2 lines"


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=60), st.integers(1, 80))
def test_foreign_text_becomes_one_printable_line(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert len(shown) <= limit
    assert all(each.isprintable() for each in shown)
    shown.encode()


def test_control_characters_are_shown_by_their_code() -> None:
    assert printable("a\x1b[31mb\u202ec\ud800\n d") == "a\\x1b[31mb\\u202ec\\ud800 d"
