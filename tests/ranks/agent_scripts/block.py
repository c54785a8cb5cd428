"""Run a re-executable block of counted steps, without a framework, as a rank that talks to the agent."""

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from checkpointless.launcher.client import AgentClient, FaultNotice
from checkpointless.launcher.protocol.board import Board
from checkpointless.launcher.protocol.causes import exception_cause
from checkpointless.launcher.protocol.messages import Answer, Barrier, Done, FaultReport, Go, Hello

RANK = int(os.environ["RANK"])
INCARNATION = int(os.environ["CHECKPOINTLESS_INCARNATION"])
OUT = Path(os.environ["CHECKPOINTLESS_RUN_DIR"])


class Restart(Exception):
    """Says that the generation is over."""


def note(kind: str, **fields: object) -> None:
    line = {"kind": kind, "rank": RANK, "pid": os.getpid(), "mono": time.monotonic(), **fields}
    with (OUT / f"notes-{RANK}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def connect() -> tuple[AgentClient, Board]:
    client, board = AgentClient.from_environment(), Board.from_environment()
    assert client is not None
    assert board is not None
    return client, board


def run_block(
    steps: int,
    work: Callable[[int, int], None],
    *,
    step_s: float = 0.02,
    inquire: Callable[[], tuple[bool, str]] = lambda: (False, ""),
    cleanup: Callable[[], None] = lambda: None,
) -> None:
    """Make ``steps`` steps of ``work(step, generation)`` together with the other ranks."""
    client, board = connect()
    client.on_inquire = lambda inquiry: Answer(inquiry, *inquire())

    def heard(notice: FaultNotice) -> None:
        note("notice", generation=notice.generation, cause=notice.cause, culprit=notice.rank)

    client.on_fault = heard
    generation = int(os.environ["JOB_RESTART_COUNT"])
    client.send(Hello(generation))
    go = client.wait_go(generation - 1, 60)
    while isinstance(go, Go):
        os.environ.update(go.env)
        generation = go.generation
        board.set_generation(generation)
        note("go", generation=generation, incarnation=INCARNATION, high_water=go.high_water)
        making = -1
        try:
            for making in range(max(go.high_water, 0) + 1, steps + 1):
                board.begin_step(making)
                work(making, generation)
                until_s = time.monotonic() + step_s
                while time.monotonic() < until_s:
                    if client.pending_fault(generation) is not None:
                        raise Restart
                    time.sleep(0.002)
                board.set_committed(making)
                note("step", step=making, generation=generation)
            client.send(Done(generation))
            if not isinstance(client.wait_finish_or_fault(generation, 60), FaultNotice):
                return
        except Restart:
            pass
        except Exception as error:
            if client.pending_fault(generation) is None:
                name, text = type(error).__name__, str(error)
                victim = name.startswith("Dist") or "closed" in text.lower()
                cause = exception_cause(RANK, name, text, traceback.format_exc(), making, victim)
                client.send(FaultReport(generation, cause))
        cleanup()
        client.send(Barrier(generation))
        go = client.wait_go(generation, 60)
