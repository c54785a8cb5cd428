"""Flips of bits that checks find and heal: `python benchmarks/gradient_check/flips.py --json flips.json`."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from benchmarks.common import interruptible, machine, progress
from benchmarks.gradient_check.model import build
from checkpointless.faults.ledger import fired
from checkpointless.observability.report.summary import build_report
from checkpointless.observability.report.verify import compare
from checkpointless.observability.telemetry.events import read_events
from checkpointless.observability.telemetry.steps import read_steps

KINDS = ("embedding", "attention", "mlp", "norm", "output")
PHASES = ("gradient", "activation")


def kind_of(name: str) -> str:
    """Return the kind of layer that a module or a parameter of the model is or belongs to."""
    parts = name.split(".")
    if parts[0] != "1":
        return "embedding" if parts[0] == "0" else "output"
    return next(kind for kind, part in zip(KINDS[1:4], ("self_attn", "linear", "norm")) if part in name)


def run(run_dir: Path, nproc: int, steps: int, every: int, *faults: str) -> list[tuple[int, int]]:
    """Run a job to its end; return the ranks and steps of what was found."""
    launch = [sys.executable, "-m", "checkpointless", "run", "--cpu", "--nproc-per-node", str(nproc)]
    options = [
        "--record-steps",
        "--run-dir",
        str(run_dir),
        *(word for each in faults for word in ("--fault", each)),
    ]
    script = [str(Path(__file__).with_name("flips_train.py")), str(steps), str(every)]
    subprocess.run([*launch, *options, *script], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = build_report(str(run_dir), read_events(run_dir)).corrupted
    return [(int(each["rank"] or 0), int(each["step"] or 0)) for each in found]


def drawn(seed: int, nproc: int, count: int, last: int) -> list[tuple[str, str, int, int]]:
    """Return phase, kind of layer, rank and step of each flip; phases and kinds take turns.

    A step stands for a layer, as docs/faults.md says. The output layer of an attention is not called by itself.
    """
    dice, model = random.Random(seed), build(32, 2, 64)
    layers = [name for name, layer in model.named_modules() if [*layer.parameters(recurse=False)]]
    called = [next(each for each in layers[at:] if "out_proj" not in each) for at in range(len(layers))]
    names = {"gradient": [name for name, _ in model.named_parameters()], "activation": called}
    free, flips = set(range(2, last)), []
    for number in range(count):
        phase, kind = PHASES[number % 2], KINDS[number // 2 % len(KINDS)]
        of_phase = names[phase]
        step = dice.choice([each for each in sorted(free) if kind_of(of_phase[each % len(of_phase)]) == kind])
        free.remove(step)
        flips.append((phase, kind, dice.randrange(nproc), step))
    return flips


def main() -> None:
    """Compare a job with flips, and one that is checked in each of many steps, with undisturbed ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flips", type=int, default=60)
    parser.add_argument("--steps", type=int, default=2000, help="without flips, each checked")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    last = 6 * options.flips
    flips = drawn(options.seed, options.nproc, options.flips, last)
    faults = [f"bitflip@{phase}:rank={rank},step={step}" for phase, _, rank, step in flips]
    with tempfile.TemporaryDirectory() as folder:
        calm, flipped, checked = (Path(folder) / name for name in ("calm", "flipped", "checked"))
        progress(f"{last} steps without checks, and with {len(flips)} flips")
        run(calm, options.nproc, last, 10 * last)
        found = set(run(flipped, options.nproc, last, 1, *faults))
        verdict, caused = compare(read_steps(calm), read_steps(flipped)), fired(flipped)
        progress(f"{options.steps} steps without flips, each checked")
        false = run(checked, options.nproc, options.steps, 1)
    planted: Counter[str] = Counter(f"{phase} {kind}" for phase, kind, _, _ in flips)
    seen: Counter[str] = Counter(f"{phase} {kind}" for phase, kind, *at in flips if tuple(at) in found)
    result: dict[str, Any] = {
        "machine": machine(("torch",)),
        "seed": options.seed,
        "flips": {each: {"planted": planted[each], "found": seen[each]} for each in sorted(planted)},
        "planted": sum(caused.values()),
        "found": len(found),
        "bits_of_the_undisturbed_run": verdict.equal,
        "steps_compared": verdict.steps,
        "steps_without_flips": options.steps,
        "found_without_flips": len(false),
    }
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    with interruptible():
        main()
