"""Draw ``incident.svg``: one incident, across four ranks and time: ``python docs/images/draw_incident.py``."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 1056, 560
LEFT = 108  # where time begins
ROW, BAR = 62, 30  # from one lane to the next; height of what is drawn in it
TOP = 128

# Stage, begin and end. Not to scale: some take milliseconds, importing nothing at all takes none.
STEP_7, STEP_8 = (LEFT, LEFT + 84), (LEFT + 88, LEFT + 160)
FAULT = STEP_8[1]
STAGES = [
    ("abort", 300, 350),
    ("finalize", 350, 410),
    ("health", 410, 460),
    ("barrier", 460, 522),
    ("enter", 522, 560),
    ("init", 560, 592),
    ("rebuild", 592, 640),
    ("decide", 640, 686),
    ("transfer", 686, 762),
    ("verify", 762, 814),
    ("data", 814, 856),
]
STEP_8_AGAIN, STEP_9 = (860, 948), (952, 1038)
TOLD, GO = 294, 522

STYLE = """
  .ground { fill: #ffffff; stroke: #d6dbe1 }
  text { font: 15px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1d2733 }
  .small { font-size: 13.5px } .dim { fill: #5a6675 } .mid { text-anchor: middle } .end { text-anchor: end }
  .bold { font-weight: 600 }
  .step { fill: #cfe3f7; stroke: #5b8fc4 } .lost { fill: #fbe3c8; stroke: #cf8a35 }
  .stage { fill: #e9ecf1; stroke: #97a3b3 } .new { fill: #d5f0e2; stroke: #2f9467 }
  .dead { stroke: #c02f2f; stroke-width: 3 } .deadtext { fill: #b02525 }

  .line { stroke: #5a6675; fill: none }
  .notice { stroke: #c02f2f; stroke-width: 1.5; stroke-dasharray: 4 3 }
  .hair { stroke: #d6dbe1 } .go { stroke: #2f9467; stroke-width: 2 }
  .state { stroke: #2f9467; stroke-width: 3; fill: none } .statetext { fill: #1f7350 }
  .tip { fill: #5a6675 } .statetip { fill: #2f9467 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #171b21; stroke: #39424e }
    text { fill: #e3e8ee } .dim { fill: #a3afbd }
    .step { fill: #1d3a57; stroke: #5b8fc4 } .lost { fill: #553a17; stroke: #cf8a35 }
    .stage { fill: #2a313b; stroke: #66717f } .new { fill: #17442f; stroke: #45b382 }
    .dead { stroke: #ff6b6b } .deadtext { fill: #ff8a8a }

    .line { stroke: #a3afbd } .notice { stroke: #ff6b6b } .hair { stroke: #39424e } .go { stroke: #45b382 }
    .state { stroke: #45b382 } .statetext { fill: #6fd6a6 } .tip { fill: #a3afbd } .statetip { fill: #45b382 }
  }
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "line", tip: str = "") -> str:
    end = f' marker-end="url(#{tip})"' if tip else ""
    return f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" class="{kind}"{end}/>'


def bar(begin: float, end: float, y: float, words: str, kind: str) -> str:
    box = f'<rect x="{begin:g}" y="{y:g}" width="{end - begin:g}" height="{BAR}" rx="3" class="{kind}"/>'
    return box + text((begin + end) / 2, y + BAR / 2 + 4.5, words, "small mid")


def lane(row: int) -> float:
    """The upper edge of what is drawn in a lane; 0 is the agent's."""
    return TOP + row * ROW


def agent() -> list[str]:
    y = lane(0)
    middle = y + BAR / 2
    return [
        text(16, middle + 5, "agent", "bold"),
        text(LEFT, middle + 4.5, "generation 0", "small dim"),
        text(STEP_9[1], middle + 4.5, "generation 1", "small dim end"),
        bar(FAULT, TOLD, y, "", "stage"),
        text(FAULT, y - 8, "detect, notify: every rank is notified", "small"),
        line(TOLD, y + BAR, TOLD, lane(4) + BAR, "notice"),
        text(GO + 8, y + BAR / 2 + 4.5, "all are here: go, generation 1", "small statetext"),
        line(GO, y, GO, lane(4) + BAR + 12, "go"),
    ]


def survivor(row: int, name: str, shard: str) -> list[str]:
    y = lane(row)
    drawn = [
        text(16, y + 13, name, "bold"),
        text(16, y + 28, shard, "small dim"),
        bar(*STEP_7, y, "step 7", "step"),
        bar(STEP_8[0], TOLD - 4, y, "step 8, left", "lost"),
        *(bar(begin, end, y, stage, "stage") for stage, begin, end in STAGES),
        bar(*STEP_8_AGAIN, y, "step 8", "step"),
        bar(*STEP_9, y, "step 9", "step"),
    ]
    return drawn


def victim(row: int, name: str, shard: str) -> list[str]:
    y = lane(row)
    middle = y + BAR / 2
    return [
        text(16, y + 13, name, "bold"),
        text(16, y + 28, shard, "small dim"),
        bar(*STEP_7, y, "step 7", "step"),
        bar(*STEP_8, y, "step 8", "lost"),
        line(FAULT - 7, middle - 9, FAULT + 11, middle + 9, "dead"),
        line(FAULT - 7, middle + 9, FAULT + 11, middle - 9, "dead"),
        text(TOLD + 8, middle + 4.5, "SIGKILL", "small bold deadtext"),
        bar(364, 460, y, "new process", "new"),
        *(bar(begin, end, y, stage, "new") for stage, begin, end in STAGES if begin >= 460),
        bar(*STEP_8_AGAIN, y, "step 8", "step"),
        bar(*STEP_9, y, "step 9", "step"),
    ]


def notes() -> list[str]:
    below = lane(4) + BAR
    moved = 750
    return [
        # what the state does meanwhile
        line(300, below + 26, 762, below + 26, "state"),
        text(
            300,
            below + 46,
            "ranks 0, 2 and 3 keep hold of their own tensors: references, no copies",
            "small statetext",
        ),
        line(moved, lane(4) - 2, moved, lane(2) + BAR + 5, "state", "statetip"),
        text(moved + 10, lane(3) - 10, "rank 3 sends it the shard both hold", "small bold statetext"),
        # the headline
        line(FAULT, 62, FAULT, lane(0), "hair"),
        line(STEP_8_AGAIN[1], 62, STEP_8_AGAIN[1], lane(1) - 4, "hair"),
        line(FAULT, 66, STEP_8_AGAIN[1], 66, tip="tip"),
        text(
            (FAULT + STEP_8_AGAIN[1]) / 2, 58, "the incident: from the fault to the end of first_step", "mid bold"
        ),
        text((STEP_8_AGAIN[0] + STEP_8_AGAIN[1]) / 2, lane(1) - 8, "first_step", "small mid"),
        # the reading
        line(LEFT, HEIGHT - 66, 1038, HEIGHT - 66, tip="tip"),
        text(1038, HEIGHT - 46, "time, not to scale", "small dim end"),
        text(
            LEFT,
            HEIGHT - 46,
            "All ranks had committed step 7: nothing of it is repeated. Step 8 was not committed: it is",
            "small",
        ),
        text(
            LEFT,
            HEIGHT - 28,
            "redone from the same parameters, batch and random streams, so its loss has the same bits.",
            "small",
        ),
    ]


def draw() -> str:
    """The drawing."""
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="{size}" markerHeight="{size}" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 z" class="{name}"/></marker>'
        for name, size in (("tip", 9), ("statetip", 5))
    )
    parts = [
        *agent(),
        *survivor(1, "rank 0", "shard A"),
        *victim(2, "rank 1", "shard B"),
        *survivor(3, "rank 2", "shard A"),
        *survivor(4, "rank 3", "shard B"),
        *notes(),
    ]
    title = "One incident: rank 1 is killed in step 8, the others keep their state, and rank 3 fills its successor"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n<defs>{heads}</defs>\n"
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" class="ground"/>\n'
        + text(16, 30, "One incident: rank 1 of 4 is killed in the backward pass of step 8", "bold")
        + "\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    (Path(__file__).with_name("incident.svg")).write_text(draw())
    sys.stdout.write("incident.svg\n")
