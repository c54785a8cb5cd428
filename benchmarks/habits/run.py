"""Rehearse scripts as people write them: `python benchmarks/habits/run.py --scripts 60 --seed 1 --json FILE`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import interruptible, machine, progress
from benchmarks.habits.habits import Script, draw

LIMIT_S = 600


@dataclass(frozen=True)
class Rehearsed:
    """What the rehearsal of a script said.

    Attributes:
        name: the script's name.
        habits: the names of its habits.
        breaks: the point of the contract that it breaks; 0: none.
        verdict: ``exact``, ``inexact``, ``not rehearsed`` or ``no answer``.
        points: points of the contract that the rehearsal named for what differed first.
        sentence: its last line.
        faults: what came of each fault: the spec, the outcome and how it recovered.
        warnings: what the engine had said.
        seconds: how long it took.
    """

    name: str
    habits: tuple[str, ...]
    breaks: int
    verdict: str
    points: tuple[int, ...]
    sentence: str
    faults: tuple[tuple[str, str, str], ...]
    warnings: tuple[str, ...]
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether it is exact if the script keeps the contract, and else inexact at the point that it breaks."""
        if not self.breaks:
            return self.verdict == "exact"
        return self.verdict == "inexact" and self.breaks in self.points


def rehearse(script: Script, faults: int, seed: int, folder: Path) -> Rehearsed:
    """Rehearse a script in a folder of its own."""
    place = folder / script.name
    place.mkdir(parents=True)
    (place / "train.py").write_text(script.text)
    command = [sys.executable, "-m", "checkpointless", "rehearse", "--cpu", "--nproc-per-node", "2"]
    command += ["--faults", str(faults), "--seed", str(seed), "--json", "train.py"]
    began_s = time.monotonic()
    ended = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    took_s = time.monotonic() - began_s
    (place / "said.txt").write_text(ended.stdout + ended.stderr)
    try:
        page: dict[str, Any] = json.loads(ended.stdout)
    except ValueError:
        page = {"verdict": "no answer", "sentence": (ended.stderr.splitlines() or [""])[-1]}
    results = page.get("faults", [])
    first = next((each for each in results if each["outcome"] not in ("exact", "not tried")), None)
    return Rehearsed(
        name=script.name,
        habits=script.habits,
        breaks=script.breaks,
        verdict=page["verdict"],
        points=tuple(first["contract"]) if first else (),
        sentence=page["sentence"],
        faults=tuple((each["fault"], each["outcome"], each["rung"]) for each in results),
        warnings=tuple(page.get("warnings", [])),
        seconds=round(took_s, 1),
    )


def main() -> None:
    """Rehearse the scripts one after the other, and show what was not as it should be."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--scripts", type=int, default=60, metavar="N", help="how many are drawn (default: 60)")
    options.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the draws (default: 1)")
    options.add_argument("--faults", type=int, default=4, metavar="N", help="faults in each script (default: 4)")
    options.add_argument("--only", metavar="NAME", help="only the script of this name, for example 07-lightning")
    options.add_argument("--json", type=Path, metavar="FILE", help="where the results go (default: only shown)")
    options.add_argument("--keep", type=Path, metavar="DIR", help="keep scripts and what was said here")
    args = options.parse_args()
    about = machine(["torch", "lightning", "checkpointless"])
    rehearsed: list[Rehearsed] = []
    with interruptible(), tempfile.TemporaryDirectory(prefix="habits-") as folder:
        for script in draw(args.scripts, args.seed):
            if args.only in (None, script.name):
                rehearsed.append(rehearse(script, args.faults, args.seed, args.keep or Path(folder)))
                now = rehearsed[-1]
                progress(f"{now.name}: {'right' if now.is_right else 'WRONG'}, {now.seconds:.0f} s: {now.sentence}")
                if args.json is not None:
                    written = {"machine": about, "scripts": [asdict(each) for each in rehearsed]}
                    args.json.write_text(json.dumps(written, indent=1) + "\n")
    show(rehearsed)
    sys.exit(0 if all(each.is_right for each in rehearsed) else 1)


def show(rehearsed: list[Rehearsed]) -> None:
    """Print how many scripts were called what, and each that was not called what it is."""
    for is_kept, what in ((True, "keep the contract"), (False, "break it")):
        group = [each for each in rehearsed if (each.breaks == 0) is is_kept]
        faults = sum(len(each.faults) for each in group)
        right = sum(each.is_right for each in group)
        print(f"{len(group)} scripts {what}: {right} called what they are, {faults} faults")
    for each in rehearsed:
        if not each.is_right:
            print(f"WRONG {each.name} (breaks {each.breaks}; {', '.join(each.habits)}): {each.sentence}")


if __name__ == "__main__":
    main()
