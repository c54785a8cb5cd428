"""Write down what a run ends in on each rank, and compare two ends."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpointless.system.environment import RUN_DIR_ENV

BREAKS_ENV = "CHECKPOINTLESS_TEST_BREAKS"  # it says where ``callbacks.Breaks`` fails
SPOILS_ENV = "CHECKPOINTLESS_TEST_SPOILS"  # ``HOW FIRST LAST``, a kind and steps, any number with commas
#: These parts of an end follow from the time of day, or from how often something was begun.
_SKIPPED = frozenset({"pids"})

#: These parts hold all that was done: ranks do again what follows a step if another rank had not come as far.
IN_ALL = frozenset({"hooks in all", "validations in all"})


def run_dir() -> Path:
    return Path(os.environ[RUN_DIR_ENV])


def note(what: str, **fields: Any) -> None:
    """Write down something that must outlive this process: one line in the rank's own file."""
    path = run_dir() / "users" / f"notes-{os.environ['RANK']}.jsonl"
    path.parent.mkdir(exist_ok=True)
    generation = int(os.environ.get("JOB_RESTART_COUNT", "0"))
    line = json.dumps({"what": what, "generation": generation, "pid": os.getpid(), **fields}) + "\n"
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())


def notes(directory: Path, rank: int, what: str) -> list[dict[str, Any]]:
    """Return all that a rank's processes wrote down under that name, but for a torn last line."""
    path = directory / "users" / f"notes-{rank}.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["what"] == what]


def broken(directory: Path) -> int:
    """Return how often ``callbacks.Breaks`` has failed in the job that wrote to ``directory``."""
    return len(notes(directory, 1, "broken"))


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def plain(value: Any) -> Any:
    """Return ``value`` as JSON that is equal only if every bit is: floats as hex, tensors and arrays as digests."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return plain(value.item())
        return f"{value.dtype} {tuple(value.shape)} {digest([value])}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, int | str | bool) or value is None:
        return value
    return str(value)


def write_end(end: Mapping[str, Any]) -> None:
    """Write down this rank's end; the notes of its processes become part of it."""
    rank = int(os.environ["RANK"])
    path = run_dir() / "users" / f"end-{rank}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**plain(end), **_from_notes(run_dir(), rank)}, indent=1) + "\n")


def _from_notes(directory: Path, rank: int) -> dict[str, Any]:
    steps: dict[str, list[int]] = {}
    last: dict[str, int] = {}
    for line in notes(directory, rank, "samples"):
        step = f"fit {line['fit']}, step {line['step']}"
        if last.get(step) != line["generation"]:  # the step is made again: what was read for it before was in vain
            steps[step] = []
            last[step] = line["generation"]
        steps[step] += line["ids"]
    hooks = _by_generation((f"fit {line['fit']}, {line['name']}", line) for line in notes(directory, rank, "hook"))
    validations = _by_generation(
        (f"fit {line['fit']}, {line['loader']} at step {line['step']}", line)
        for line in notes(directory, rank, "validation")
    )
    of_last = {key: found[max(found)] for key, found in validations.items()}
    return {
        "fits": {str(line["fit"]): line["end"] for line in reversed(notes(directory, rank, "fit"))},
        "samples": {step: sorted(ids) for step, ids in steps.items()},
        # What follows a step is gone through again if a rank had not come as far, and its state is taken back.
        "hooks": {key: len(found[max(found)]) for key, found in sorted(hooks.items())},
        "hooks in all": {key: sum(map(len, found.values())) for key, found in sorted(hooks.items())},
        "validations": {key: [line["loss"] for line in found] for key, found in of_last.items()},
        "validations in all": {
            key: [line["loss"] for lines in found.values() for line in lines] for key, found in validations.items()
        },
        "batches": {
            f"fit {line['fit']}, step {line['step']}": line["index"] for line in notes(directory, rank, "batch")
        },
        "epochs": {  # the hook at their start runs again in a recovery
            f"fit {line['fit']}, epoch {line['number']}": line["metrics"]
            for line in reversed(notes(directory, rank, "epoch"))
        },
        "orders": [line["order"] for line in notes(directory, rank, "order")][-1:],
        "pids": sorted({line["pid"] for line in notes(directory, rank, "process")}),
    }


def _by_generation(lines: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Group lines by their key and then by the generation that they were written in."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for key, line in lines:
        found.setdefault(key, {}).setdefault(line["generation"], []).append(line)
    return found


def read_ends(directory: Path, nproc: int) -> list[dict[str, Any]]:
    return [json.loads((directory / "users" / f"end-{rank}.json").read_text()) for rank in range(nproc)]


@dataclass(frozen=True)
class Difference:
    rank: int
    place: tuple[str, ...]  # where in the end, as keys
    expected: Any
    found: Any

    def __str__(self) -> str:
        expected, found = (json.dumps(each)[:300] for each in (self.expected, self.found))
        return f"rank {self.rank}: {' / '.join(self.place)}: expected {expected}, found {found}"


def compare_ends(
    expected: list[dict[str, Any]], found: list[dict[str, Any]], *, parts: Iterable[str] | None = None
) -> list[Difference]:
    """Return all that is different, rank by rank; ``parts`` None: in all that is not of the moment or of IN_ALL."""
    if len(expected) != len(found):
        raise ValueError(f"{len(expected)} ranks cannot be compared with {len(found)}")
    differences: list[Difference] = []
    for rank, ends in enumerate(zip(expected, found)):
        wanted = {*ends[0], *ends[1]} - IN_ALL if parts is None else {*parts}
        one, other = (
            dict(_leaves({part: each for part, each in end.items() if part in wanted - _SKIPPED})) for end in ends
        )
        for place in [*one, *(each for each in other if each not in one)]:
            if one.get(place) != other.get(place):
                differences.append(Difference(rank, place, one.get(place), other.get(place)))
    return differences


def _leaves(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        items = [*value.items()]
    elif isinstance(value, list) and not all(isinstance(each, str) for each in value):
        items = [(str(index), each) for index, each in enumerate(value)]
    else:  # a list of names is one thing
        yield place, value
        return
    for key, each in items:
        yield from _leaves(each, (*place, key))
