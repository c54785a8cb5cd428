"""Check that the page is one file that needs nothing else, in which nothing of a run is taken for markup."""

import re
from html.parser import HTMLParser
from typing import Any

from hypothesis import given

from checkpointless.observability.report.summary import build_report
from checkpointless.observability.telemetry.events import Event
from tests.drawn import examples
from tests.unit.made_up_run import MadeUpRun
from tests.unit.report.reports import HOSTILE, LOGS, html_page

KNOWN = {"html", "head", "meta", "style", "body", "pre", "code", "span"}


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in KNOWN
        assert {name for name, _ in attrs} <= {"charset", "class", "style"}

    def handle_data(self, data: str) -> None:
        self.words += data


def page_of(events: list[Event], tracebacks: dict[str, str] | None = None, **more: Any) -> str:
    return html_page(build_report("runs/1", events, **more), tracebacks or {})


def check(text: str) -> Page:
    assert not re.search(r"url\(|@import|https?://", text)
    assert text.rstrip().endswith("</html>")
    text.encode()
    return Page(text)


def test_all_of_a_report_is_on_the_page() -> None:
    run = MadeUpRun(ranks=4)
    run.start()
    run.incident(31.0, "1", committed=21, spec="sigkill@optimizer:rank=1,step=22")
    run.incident(50.0, "2", committed=30, resumed=25)
    run.end(60.0, step=40)
    page = check(page_of(run.events, caused={"sigkill@optimizer:rank=1,step=22": 1}))
    for said in ("ETTR", "sigkill", "finished steps lost: 5", "rank 0: 1.5", "injected"):
        assert said in page.words


def test_what_comes_from_a_run_is_text() -> None:
    run = MadeUpRun()
    run.start()
    run.incident(31.0, "1", committed=21, cause=HOSTILE, how=HOSTILE, spec=f"{HOSTILE}@x")
    run.incident(50.0, "2", committed=30, until="decide", cause=HOSTILE)
    run.add(52.0, "fallback", "point", 0, incident="2", reason=HOSTILE)
    run.end(60.0, code=1, reason=HOSTILE)
    text = page_of(run.events, caused={HOSTILE: 1}, tracebacks={"1": f"Traceback:\n  here\n{HOSTILE}"})
    page = check(text)
    assert "<script" not in text
    assert "\n  here\n" in page.words
    assert "{{ 7 * 7 }}" in page.words
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


@examples(25)
@given(LOGS)
def test_any_log_has_a_page(events: list[Event]) -> None:
    check(page_of(events))
