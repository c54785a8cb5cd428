"""Device memory at the peak of a re-entry: `python benchmarks/peak_memory/run.py --json results.json`."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import ROOT, Job, interruptible, machine, parser, progress, search_path, wait_for

SCRIPT = ROOT / "tests" / "device" / "wide.py"
NPROC, LIMIT_S, HEARTBEAT_S = 4, 300.0, 60
PRELOAD = "nemo.lightning,nemo.collections.llm,checkpointless.testing.demo.text,checkpointless.strategies"
SURVIVOR, KILLED = 2, 1
FAULTS = (f"exception@forward:rank={SURVIVOR},step=3", f"sigkill@optimizer:rank={KILLED},step=5")
LAYOUTS = {
    "dp=4, d=2": (),
    "dp=4, d=1 (4 instances)": ("--instances", "4"),
    "tp=2, dp=2, d=1": ("--tensor-parallel", "2"),
    "pp=2, dp=2, d=1": ("--pipeline-parallel", "2"),
}
MB = 1e6


@dataclass(frozen=True)
class Peak:
    """What one rank held, in bytes.

    Attributes:
        layout: of the job.
        parameters: P, how many parameters the rank has.
        shards: d, over how many ranks the optimizer of one instance is spread.
        start: the most before the first step of all.
        steady: after a step.
        step: the most in a step.
        reentry: the most from the fault to the next step, in a process that lived through it.
        successor: the most before its first step, in a process that was started after the fault.
    """

    layout: str
    parameters: int
    shards: float
    start: int
    steady: int
    step: int
    reentry: int
    successor: int


def measure(layout: str, options: tuple[str, ...], directory: Path) -> Peak:
    """Run one job through an exception and a kill."""
    command = [sys.executable, "-m", "checkpointless", "run", "--cpu", "--nproc-per-node", str(NPROC)]
    command += ["--preload", PRELOAD, "--heartbeat-timeout", str(HEARTBEAT_S), "--run-dir", str(directory / "run")]
    command += [word for fault in FAULTS for word in ("--fault", fault)]
    command += [str(SCRIPT), *options]
    with Job([command], [{"PYTHONPATH": search_path()}], directory / "output.log") as job:
        if not wait_for(lambda: job.ended, LIMIT_S) or job.exit_codes() != [0]:
            raise RuntimeError(f"{layout} did not end well: {(directory / 'output.log').read_text()[-3000:]}")
    files = (directory / "run").glob("memory-*.jsonl")
    return peak_of(layout, [json.loads(line) for file in files for line in file.read_text().splitlines()])


def peak_of(layout: str, lines: list[dict[str, Any]]) -> Peak:
    """What the lines say that the ranks of a run have written."""
    entered = {(line["rank"], line["generation"]): line for line in lines if line["what"] == "entered"}
    steps = [line for line in lines if line["what"] == "stepped" and line["rank"] == SURVIVOR]
    calm = [line for line in steps if line["generation"] == 0]
    parameters, mains = calm[-1]["parameters"], calm[-1]["mains"]
    return Peak(
        layout,
        parameters,
        parameters / mains,
        entered[SURVIVOR, 0]["most"],
        calm[-1]["held"],
        calm[-1]["most"],
        entered[SURVIVOR, 1]["most"],
        entered[KILLED, 2]["most"],
    )


def table(peaks: list[Peak]) -> str:
    """Markdown."""
    rows = [
        "| layout | P | d | after a step | most in a step | at the start | most at re-entry | in a successor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in peaks:
        sizes = [each.steady, each.step, each.start, each.reentry, each.successor]
        shown = [f"{size / MB:.1f} MB, {size / each.parameters:.1f} P" for size in sizes]
        shown[3] += f", **{each.reentry / each.steady:.2f}** times"
        rows.append(f"| {each.layout} | {each.parameters:,} | {each.shards:.1f} | " + " | ".join(shown) + " |")
    return "\n".join(rows)


def main() -> int:
    """Measure every layout."""
    options = parser(__doc__ or "")
    options.add_argument("--layout", choices=LAYOUTS, action="append", help="only this one")
    options.add_argument("--hooked", action="store_true", help="a callback changes the model, which cannot be kept")
    given = options.parse_args()
    hooked = ("--hooked",) if given.hooked else ()
    peaks: list[Peak] = []
    with tempfile.TemporaryDirectory() as temporary:
        for layout in given.layout or LAYOUTS:
            progress(layout)
            directory = Path(temporary) / str(len(peaks))
            directory.mkdir()
            peaks.append(measure(layout, (*LAYOUTS[layout], *hooked), directory))
    print(table(peaks))
    if given.json:
        found: dict[str, Any] = {"machine": machine(["torch", "megatron-core", "nemo-toolkit"])}
        given.json.write_text(json.dumps({**found, "peaks": [asdict(each) for each in peaks]}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    with interruptible():
        sys.exit(main())
