"""What is seen of each fault, after how long, and what it costs: `python benchmarks/detection/run.py`.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import ROOT, interruptible, machine, progress, search_path, shown
from checkpointless.observability.report.incidents import Outcome, summarize
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import read_events
from checkpointless.system.environment import TOKEN_ENV

HEARTBEAT_S = 5.0
NODE_TIMEOUT_S = 4.0
LIMIT_S = 300.0


@dataclass(frozen=True)
class Scene:
    """A job and the faults that come in it, one after the other.

    Attributes:
        nodes: how many train; their ranks are four in all.
        spares: how many wait.
        faults: specs, in the order of their steps.
    """

    name: str
    nodes: int
    spares: int
    faults: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Of the job: two more than the last fault's."""
        return int(self.faults[-1].rpartition("=")[2]) + 2


SCENES = (
    Scene(
        "one node",
        1,
        0,
        (
            "exception@backward:rank=1,step=3",
            "sigkill@backward:rank=2,step=6",
            "exit@backward:rank=3,step=9",
            "segfault@backward:rank=1,step=12",
            "abort@backward:rank=2,step=15",
        ),
    ),
    Scene(
        "one node, silent ranks",
        1,
        0,
        (
            "hang@backward:rank=1,step=3",
            "gil@backward:rank=2,step=6",
            "sigstop@backward:rank=3,step=9",
        ),
    ),
    Scene(
        "two nodes and a spare",
        2,
        1,
        (
            "exception@backward:rank=3,step=3",
            "sigkill@backward:rank=3,step=6",
            "hang@backward:rank=2,step=9",
            "node@backward:rank=2,step=12",
        ),
    ),
)


@dataclass(frozen=True)
class Found:
    """One fault and what came of it.

    Attributes:
        detect_s: from the fault to the first event that says so.
        total_s: from the fault to the end of the first optimizer step after it.
        respawned: ranks that got a new process.
    """

    scene: str
    fault: str
    cause: str
    detect_s: float
    total_s: float
    respawned: tuple[int, ...]


def play(scene: Scene) -> list[Found]:
    """Run a scene.

    Raises:
        RuntimeError: the job failed, or an incident did not end as it should.
    """
    with tempfile.TemporaryDirectory(prefix="checkpointless-detection-") as folder:
        run_dir = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "checkpointless",
            "train",
            "tiny_gpt_cpu",
            "--cpu",
            "--run-dir",
            str(run_dir),
        ]
        command += ["--nproc-per-node", str(4 // scene.nodes), "--heartbeat-timeout", str(HEARTBEAT_S)]
        for fault in scene.faults:
            command += ["--fault", fault]
        if scene.nodes > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                endpoint = f"127.0.0.1:{free.getsockname()[1]}"
            command += ["--nnodes", str(scene.nodes), "--spares", str(scene.spares), "--rdzv-endpoint", endpoint]
            command += ["--node-timeout", str(NODE_TIMEOUT_S)]
        environment = {**os.environ, "PYTHONPATH": search_path(), TOKEN_ENV: secrets.token_hex(32)}
        agents = [
            subprocess.Popen(
                [*command, "--node-rank", str(node), f"trainer.max_steps={scene.steps}"],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE if node == 0 else subprocess.DEVNULL,
                text=True,
            )
            for node in range(scene.nodes + scene.spares)
        ]
        try:
            _, said = agents[0].communicate(timeout=LIMIT_S)
            if agents[0].returncode != 0:
                raise RuntimeError(f"{scene.name}: the job failed:\n{said[-3000:]}")
        finally:
            for agent in agents:
                agent.terminate()
            for agent in agents:
                agent.wait(30)
        incidents = summarize(read_events(run_dir))
    if [incident.outcome for incident in incidents] != [Outcome.RESUMED] * len(scene.faults):
        raise RuntimeError(f"{scene.name}: {[each.cause for each in incidents]}")
    return [
        Found(
            scene.name,
            fault,
            incident.cause,
            incident.stages_s[EventName.DETECT],
            incident.headline_s or float("nan"),
            incident.respawned,
        )
        for fault, incident in zip(scene.faults, incidents)
    ]


def table(found: list[Found]) -> str:
    """The results as Markdown."""
    lines = [
        "| job | fault | what is said | seen after, s | new processes | next step made after, s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for scene in SCENES:
        for fault in scene.faults:
            of = [each for each in found if (each.scene, each.fault) == (scene.name, fault)]
            if of:
                cause = of[0].cause.partition(": injected")[0]
                ranks = ", ".join(map(str, of[0].respawned)) or "none"
                lines.append(
                    f"| {scene.name} | `{fault.partition(':')[0]}` | {cause} | {shown([e.detect_s for e in of])} "
                    f"| {ranks} | {shown([e.total_s for e in of])} |"
                )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of every scene (default: 3)")
    parser.add_argument("--json", type=Path, help="write every incident to this file")
    options = parser.parse_args()
    about = machine(["torch", "nemo_toolkit"])
    found: list[Found] = []
    with interruptible():
        for repeat in range(options.repeats):
            for scene in SCENES:
                progress(f"{repeat + 1}/{options.repeats}: {scene.name}")
                found += play(scene)
    print(table(found))
    if options.json is not None:
        results = {"machine": about, "incidents": [asdict(each) for each in found]}
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
