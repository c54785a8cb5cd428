"""Find by their ids which processes of a run were replaced, and whether a fault had come in them."""

import json
from collections import Counter
from collections.abc import Collection
from itertools import groupby
from pathlib import Path

from checkpointless.faults.ledger import FAULTS_DIR
from checkpointless.faults.spec import DEADLY, HANGING, parse
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import read_events
from tests.ranks.users.end import notes


def replaced_healthy(run_dir: Path, ranks: Collection[int]) -> tuple[str, ...]:
    """Return the processes that were replaced although no deadly or hanging fault had been caused in them.

    A process writes its id down when it enters the block, a fault when it comes. Where a rank was started more
    often than ids are known, the unknown ones count too.
    """
    hit = _hit(run_dir)
    started = Counter(
        event.rank
        for event in read_events(run_dir)
        if event.stage == EventName.RESPAWN and event.edge == "begin" and event.rank is not None
    )
    found = []
    for rank in ranks:
        # In a long run a number is given to another process later on.
        pids = [pid for pid, _ in groupby(line["pid"] for line in notes(run_dir, rank, "process"))]
        found += [f"{rank}:{pid}" for pid in pids[:-1] if pid not in hit]
        found += [f"{rank}:?"] * max(0, started[rank] - (len(pids) - 1))
    return tuple(found)


def _hit(run_dir: Path) -> set[int]:
    claims = [json.loads(path.read_bytes()) for path in (run_dir / FAULTS_DIR).glob("*.json")]
    return {claim["pid"] for claim in claims if parse(claim["spec"]).kind in (*DEADLY, *HANGING)}
