"""Make up the events of runs, for tests of what is made of them."""

import json
from pathlib import Path
from typing import Any

from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, Edge, Event

S = 1_000_000_000
UTC = 1_700_000_000 * S
ENDING = ("abort", "finalize", "health", "barrier")
STARTING = ("enter", "init", "rebuild", "decide", "transfer", "verify", "data")
STAGE_S = 0.1


class MadeUpRun:
    """Writes the events of a run, second by second."""

    def __init__(self, ranks: int = 2, per_node: int = 8, generation: int = 0) -> None:
        self.ranks = ranks
        self.per_node = per_node
        self.generation = generation
        self.events: list[Event] = []

    def write(self, run_dir: Path) -> Path:
        run_dir.mkdir(exist_ok=True)
        lines = [json.dumps({**vars(event), **event.fields, "fields": None}) for event in self.events]
        (run_dir / EVENTS_FILE).write_text("".join(f"{line}\n" for line in lines))
        return run_dir

    def add(self, at_s: float, stage: str, edge: Edge, rank: int | None = None, **fields: Any) -> None:
        incident = fields.pop("incident", None)
        generation = fields.pop("generation", self.generation)
        node = 0 if rank is None else rank // self.per_node
        ns = round(at_s * S)
        pid = 100 if rank is None else 1000 + rank
        self.events.append(Event(UTC + ns, ns, node, rank, pid, generation, incident, stage, edge, fields))

    def span(self, at_s: float, stage: str, rank: int, long_s: float = STAGE_S, **fields: Any) -> None:
        about = {key: fields[key] for key in ("incident", "generation") if key in fields}
        self.add(at_s, stage, "begin", rank, **about)
        self.add(at_s + long_s, stage, "end", rank, **fields)

    def start(self, at_s: float = 10.0) -> None:
        """Begin the job at 0, have it train from ``at_s`` on and make its first step a second later."""
        self.add(0.0, "job", "begin", nproc=self.ranks, nnodes=1, script="train.py")
        for rank in range(self.ranks):
            self.add(at_s - 0.1, "data", "begin", rank)
            self.add(at_s, "data", "end", rank)
            self.add(at_s, "first_step", "begin", rank)
            self.add(at_s + 1, "first_step", "end", rank, step=1)

    def incident(
        self, at_s: float, name: str, committed: int, resumed: int | None = None, cause: str = "", **about: Any
    ) -> float:
        """Add a fault at ``at_s`` and the recovery from it, and return when that is over.

        Args:
            committed: the newest step that was committed.
            resumed: the step after which training goes on; default: the same.
            cause: what is said of it.
            about: ``spec`` of an injected fault, ``how`` it was noticed, ``culprit``, ``until`` which stage.
        """
        resumed = committed if resumed is None else resumed
        culprit, until = about.get("culprit", 1), about.get("until", "first_step")
        if "spec" in about:
            self.add(at_s, EventName.FAULT_INJECTED, "point", culprit, spec=about["spec"], step=committed + 1)
        why = {"cause": cause or f"rank {culprit} failed", "how": about.get("how", "exception")}
        self.add(at_s + 0.1, "detect", "point", incident=name, culprit=culprit, **why)
        self.add(at_s + 0.1, "notify", "begin", incident=name)
        self.add(at_s + 0.15, "notify", "end", incident=name, ranks=list(range(self.ranks)))
        at_s += 0.2
        for stage in ENDING:
            for rank in range(self.ranks):
                self.span(at_s, stage, rank, incident=name)
            at_s += STAGE_S
        self.generation += 1
        self.add(at_s, "go", "point", incident=name, high_water=committed)
        for stage in (*STARTING, "first_step"):
            for rank in range(self.ranks):
                fields: dict[str, Any] = {"incident": name}
                if stage == EventName.DECIDE:
                    fields |= {"target": resumed, "reason": ""}
                if stage == EventName.TRANSFER and rank == culprit:
                    fields |= {"bytes": 1_500_000, "sources": [0]}
                if stage == EventName.FIRST_STEP:
                    fields |= {"step": resumed + 1}
                self.span(at_s, stage, rank, **fields)
            at_s += STAGE_S
            if stage == until:
                break
        return at_s

    def end(self, at_s: float, code: int = 0, step: int | None = None, reason: str = "") -> None:
        """End the job at ``at_s``; if ``step`` is given, its ranks made that last step a second before."""
        if step is not None:
            for rank in range(self.ranks):
                self.add(at_s - 0.2, "trained", "point", rank, step=step, before_s=0.8)
        self.add(at_s, "job", "end", code=code, reason=[reason] if reason else [])
