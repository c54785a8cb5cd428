"""Check that the page is one file that needs nothing else, in which nothing of a run is taken for markup."""

import re
from html.parser import HTMLParser
from typing import Any

from hypothesis import given

from checkpointless.report.incidents import by_incident
from checkpointless.report.page import render
from checkpointless.report.page.pictures import rank_lanes, tile_bars
from checkpointless.report.summary import PHASES, build_report
from checkpointless.telemetry.event_names import STAGES
from checkpointless.telemetry.events import Event
from tests.drawn import examples
from tests.unit.made_up_run import MadeUpRun
from tests.unit.report.reports import HOSTILE, LOGS

VOID = {"meta"}
KNOWN = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "section", "footer", "div", "span", "p"),
    *(
        "h1",
        "h2",
        "b",
        "i",
        "pre",
        "ul",
        "li",
        "dl",
        "dt",
        "dd",
        "code",
        "details",
        "summary",
        "table",
        "tr",
        "th",
        "td",
    ),
    *("svg", "rect", "line", "circle", "text"),
}


class Page(HTMLParser):
    """Collects the elements, attributes and text of a page, and checks that each element is closed in its place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(events: list[Event], tracebacks: dict[str, str] | None = None, **more: Any) -> str:
    return render(build_report("runs/1", events, **more), events, tracebacks)


def check(text: str) -> Page:
    page = Page(text)
    assert {tag for tag, _ in page.elements} <= KNOWN
    for _, attributes in page.elements:
        assert not {"src", "href", "srcdoc", "action", "style"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import|https?://", text)
    assert '<meta name="viewport"' in text
    text.encode()
    return page


def ordinary() -> MadeUpRun:
    run = MadeUpRun(ranks=4)
    run.start()
    run.incident(31.0, "1", committed=21, spec="sigkill@optimizer:rank=1,step=22")
    run.incident(50.0, "2", committed=30, resumed=25)
    run.end(60.0, step=40)
    return run


def test_all_of_a_report_is_on_the_page() -> None:
    run = ordinary()
    page = check(page_of(run.events, caused={"sigkill@optimizer:rank=1,step=22": 1}))
    words = " ".join(" ".join(page.words).split())
    for said in ("ETTR", "sigkill", "5, 80 samples", "1.5 MB from rank 0", "--restart-load", "caused on purpose"):
        assert said in words
    lanes = [attributes for tag, attributes in page.elements if attributes.get("aria-label") == "rank 3"]
    assert len(lanes) == 2


def test_what_comes_from_a_run_is_text() -> None:
    run = MadeUpRun()
    run.start()
    run.incident(31.0, "1", committed=21, cause=HOSTILE, how=HOSTILE, spec=f"{HOSTILE}@x")
    run.incident(50.0, "2", committed=30, until="decide", cause=HOSTILE)
    run.add(52.0, "fallback", "point", 0, incident="2", reason=HOSTILE)
    run.end(60.0, code=1, reason=HOSTILE)
    text = page_of(run.events, caused={HOSTILE: 1}, tracebacks={"1": f"Traceback:\n  here\n{HOSTILE}"})
    check(text)
    assert "<script" not in text
    assert "\n  here\n" in text
    assert "{{ 7 * 7 }}" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_three_hundred_incidents_are_still_a_page() -> None:
    run = MadeUpRun(ranks=4)
    run.start()
    kinds = ("exception", "SIGKILL", "hang", "SIGTERM", "exit")
    for number in range(300):
        run.incident(20.0 + 5 * number, str(number), committed=10 + number, how=kinds[number % 5], cause="x" * 5000)
    text = page_of(run.events)
    page = check(text)
    assert len(text) < 700_000
    assert len([tag for tag, attributes in page.elements if attributes.get("class") == "incident"]) <= 20
    assert "All 300 incidents" in text
    for kind in kinds:
        assert f'<span class="chip kind">{kind.lower()}</span>' in text


def test_what_is_not_exact_is_named() -> None:
    run = MadeUpRun()
    run.start()
    run.incident(31.0, "1", committed=21)
    run.add(31.5, "inexact", "point", 1, incident="1", step=22, reason="step 22 takes another batch")
    text = page_of(run.events)
    check(text)
    assert "resumed, not exact</span> after step 21: rank 1: step 22 takes another batch" in text
    assert "0 resumed, 1 not exact, 0 escalated" in text


def test_of_a_thousand_ranks_those_are_shown_that_the_incident_was_about() -> None:
    run = MadeUpRun(ranks=1000)
    run.start()
    run.incident(31.0, "1", committed=21, culprit=503)
    report = build_report("x", run.events)
    lanes, hidden = rank_lanes(report.incidents[0], by_incident(run.events)["1"])
    assert {"rank 0", "rank 503"} <= {lane.name for lane in lanes}
    assert hidden == 1000 - len(lanes)
    assert len(page_of(run.events)) < 200_000


def test_bars_stay_within_their_line() -> None:
    run = ordinary()
    report = build_report("x", run.events)
    for incident in report.incidents:
        lanes, _ = rank_lanes(incident, by_incident(run.events)[incident.incident])
        for bars in (tile_bars(incident), *(lane.bars for lane in lanes)):
            assert bars
            assert all(0 <= bar.x <= 100 and bar.width >= 0 and bar.x + bar.width <= 100.001 for bar in bars)


def test_every_stage_has_a_colour() -> None:
    coloured = [stage for stages in PHASES.values() for stage in stages]
    assert sorted(coloured) == sorted([*STAGES, "respawn"])


@examples(25)
@given(LOGS)
def test_any_log_has_a_page(events: list[Event]) -> None:
    check(page_of(events))
