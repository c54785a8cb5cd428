"""One schedule of faults, six ways to go on: `python benchmarks/head_to_head/run.py --json FILE`.

See README.md beside this file.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import (
    ROOT,
    TARGETS,
    Job,
    Mark,
    folder_of_runs,
    install_beside,
    interruptible,
    machine,
    parser,
    progress,
    read_marks,
    search_path,
)
from benchmarks.head_to_head.rank import APART, KINDS, NODE_ENV, RANKS, SIDES, SLOW_STEPS, STEPS, schedule
from benchmarks.trainers.run import free_ports

HERE = Path(__file__).resolve().parent
BRIDGE_ENV = "RESILIENCY_PYTHON"
PACKAGES = {"torchft": "torchft-nightly==2026.10.26", "lm_resiliency": "lm-resiliency==0.2.0"}
NODES, SPARES = 2, 2
LOOKS = ("checked",)  # for wrong gradients
FLIP, FLIPPED = ("corrupted",), ("torchrun", "checkpointless")  # sides that run with nothing but the flip, too
TOKEN = "of-a-benchmark-on-one-machine"
LIMIT_S, STUCK_S, QUIET_S = 900.0, 240.0, 60.0


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        kinds: of faults that came.
        began: date and time.
        load: of the machine, when it began and when it ended.
        wall_s: from the start of the job until the last rank had made its last step.
        goodput: the time that the steps take undisturbed under torchrun, over the wall time; None: it did not end.
        redone: steps that a rank had committed and made again.
        left_out: batches, one per rank and step, that are in no step.
        seconds: lost by cause, until a step is committed that was not before.
        digests: of the parameters of each rank that came to its end, each once.
    """

    side: str
    seed: int
    kinds: list[str]
    began: str
    load: list[float]
    wall_s: float
    goodput: float | None
    step_s: float
    redone: int
    left_out: int
    seconds: dict[str, float]
    digests: list[str]


def python_of(side: str) -> str | None:
    """Return the interpreter of a side, once what it needs lies where only it sees it; None: it cannot be had."""
    if side == "ft_launcher":
        python = Path(os.environ.get(BRIDGE_ENV, ROOT / ".venv-bridge312" / "bin" / "python"))
        return str(python) if python.exists() else None
    if side in PACKAGES:
        try:
            install_beside(beside(side), PACKAGES[side])
        except SystemExit as error:
            progress(str(error))
            return None
    return sys.executable


def beside(side: str) -> Path:
    """Return where the package of a side lies, which runs with this environment's torch."""
    return TARGETS / PACKAGES.get(side, "none").replace("==", "-")


class Cluster:
    """Two nodes of two ranks on this machine, and two nodes that wait.

    Args:
        python: the interpreter.
        arguments: of each rank.
    """

    def __init__(self, side: str, python: str, arguments: Sequence[str], directory: Path) -> None:
        self._side, self._python, self._directory = side, python, directory
        self._script = [str(HERE / "rank.py"), side, *arguments]
        self._ports = free_ports(2)
        self._nodes: dict[int, Job] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        if self._side == "torchft":
            lighthouse = [str(beside(self._side) / "bin" / "torchft_lighthouse"), "--min_replicas", "2"]
            lighthouse += ["--bind", f"[::]:{self._ports[0]}", "--quorum_tick_ms", "10"]
            lighthouse += ["--join_timeout_ms", "10000", "--heartbeat_timeout_ms", "1000"]
            self._open([lighthouse], [{"PYTHONPATH": str(beside(self._side))}])
        for node in range(NODES + (0 if self._side == "torchft" else SPARES)):
            self.start(node)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def ended(self) -> bool:
        """Whether no node runs any more."""
        return all(job.ended for job in self._nodes.values())

    def start(self, node: int) -> None:
        """Start a node."""
        environment = {
            "PYTHONPATH": search_path(HERE, beside(self._side)),
            "OMP_NUM_THREADS": "1",
            NODE_ENV: str(node),
        }
        environment |= {"CHECKPOINTLESS_TOKEN": TOKEN}
        if self._side == "torchft":
            groups = [RANKS // NODES * node + each for each in range(RANKS // NODES)]
            environment |= {"TORCHFT_LIGHTHOUSE": f"http://localhost:{self._ports[0]}"}
            environment |= {"NUM_REPLICA_GROUPS": str(RANKS)}
            alone = [*self._torchrun(), "--nnodes", "1", "--nproc-per-node", "1", "--master-port"]
            commands = [[*alone, str(port), *self._script] for port in free_ports(len(groups))]
            environments = [{**environment, "REPLICA_GROUP_ID": str(group)} for group in groups]
            self._nodes[node] = self._open(commands, environments)
            return
        endpoint = ["--rdzv-endpoint", f"127.0.0.1:{self._ports[0]}", "--nproc-per-node", str(RANKS // NODES)]
        if self._side in ("checkpointless", "checked"):
            command = [self._python, "-m", "checkpointless", "run", *endpoint, "--nnodes", str(NODES)]
            command += ["--node-rank", str(node), "--spares", str(SPARES), "--heartbeat-timeout", "10"]
            command += ["--run-dir", str(self._directory / "run")]
        else:
            more = f":{NODES + SPARES}" if self._side == "ft_launcher" else ""  # it counts those that wait
            command = [*self._torchrun(), *endpoint, "--nnodes", f"{NODES}{more}", "--rdzv-backend", "c10d"]
            command += ["--rdzv-id", "1", "--local-addr", "127.0.0.1", "--rdzv-conf"]
            command += ["keep_alive_interval=1,keep_alive_max_attempt=3,is_host=" + str(int(node == 0))]
            # With torchrun's default, the agent's store, no restart works: gloo finds the dead ranks' addresses.
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if self._side == "ft_launcher":
            command += ["--ft-rank-heartbeat-timeout", "10", "--ft-initial-rank-heartbeat-timeout", "60"]
            command += ["--ft-workload-check-interval", "1", "--ft-enable-nic-healthcheck", "false"]
        self._nodes[node] = self._open([[*command, *self._script]], [environment])

    def leave(self, kind: str, node: int, rank: int) -> None:
        """Take a node away: at once, or as the side does it that is told before."""
        if kind == "planned" and self._side in ("checkpointless", "checked"):
            move = [self._python, "-m", "checkpointless", "move", "--rank", str(rank)]
            move += ["--rdzv-endpoint", f"127.0.0.1:{self._ports[0]}"]
            environment = {**os.environ, "CHECKPOINTLESS_TOKEN": TOKEN, "PYTHONPATH": search_path()}
            done = subprocess.run(move, env=environment, capture_output=True, text=True, timeout=120, check=False)
            progress(f"move: {done.stdout.strip()} {done.stderr.strip()[-200:]}")
        if kind == "planned" and self._side == "ft_launcher":
            return  # a rank has told its launcher
        self._nodes[node].kill()
        if self._side == "torchft":  # it has no spares: its launchers start a lost group again
            self.start(node)

    def _torchrun(self) -> list[str]:
        launcher = ["-m", "torch.distributed.run"]
        if self._side == "ft_launcher":  # as its command does it: with -m it does not know its own exceptions
            launcher = ["-c", "from nvidia_resiliency_ext.fault_tolerance.launcher import main; main()"]
        return [self._python, *launcher, "--max-restarts", "20", "--monitor-interval", "0.1"]

    def _open(self, commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]) -> Job:
        return self._stack.enter_context(Job(commands, environments, self._directory / "output.log"))


def train(side: str, python: str, seed: int, kinds: Sequence[str], directory: Path) -> tuple[list[Mark], float]:
    """Run one job to its end; return its marks, and when it began."""
    directory.mkdir(parents=True)
    began_s = time.monotonic()
    with Cluster(side, python, [str(directory), str(STEPS), str(seed), ",".join(kinds)], directory) as cluster:
        handled: set[str] = set()
        while True:
            time.sleep(0.1)
            marks = read_marks(directory)
            for mark in marks:
                kind = mark.detail.get("kind", "")
                if kind in ("planned", "node") and kind not in handled:
                    handled.add(kind)
                    cluster.leave(kind, mark.detail["node"], mark.rank)
            ended = {mark.rank for mark in marks if mark.what == "end"}
            newest_s, now_s = max((mark.at_s for mark in marks), default=began_s), time.monotonic()
            is_quiet = now_s - newest_s > (QUIET_S if ended else STUCK_S)
            if len(ended) == RANKS or is_quiet or cluster.ended or now_s - began_s > LIMIT_S:
                return marks, began_s


def judge(marks: Sequence[Mark], began_s: float, calm_step_s: float | None) -> dict[str, Any]:
    """Return what a run's marks say; without ``calm_step_s``, this run's steps are the undisturbed ones."""
    steps = [mark for mark in marks if mark.what == "step"]
    count: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    first_s: dict[int, float] = {}
    for mark in steps:
        count[mark.detail["step"]][mark.rank] += 1
        first_s.setdefault(mark.detail["step"], mark.at_s)
    between = [first_s[step + 1] - at_s for step, at_s in sorted(first_s.items()) if step + 1 in first_s]
    own_step_s = statistics.median(between) if between else 0.0
    step_s = own_step_s if calm_step_s is None else calm_step_s
    end_s = max((mark.at_s for mark in marks if mark.what == "end"), default=marks[-1].at_s if marks else began_s)
    wall_s = end_s - began_s
    seconds = {"startup": first_s[min(first_s)] - began_s - step_s} if first_s else {}
    found = {mark.detail["kind"]: mark for mark in reversed(marks) if mark.what == "fault"}  # the first of each
    for kind, mark in sorted(found.items(), key=lambda item: item[1].at_s):
        before = max((each.detail["step"] for each in steps if each.at_s < mark.at_s), default=0)
        last = before + {"straggler": SLOW_STEPS, "planned": APART}.get(kind, 1)  # a move takes a while to begin
        over_s = min((each.at_s for each in steps if each.detail["step"] >= last), default=end_s)
        seconds[kind] = max(0.0, over_s - mark.at_s - (last - before) * step_s)
    has_ended = any(mark.what == "end" for mark in marks)
    useful_s = len(first_s) * step_s
    seconds["other"] = max(0.0, wall_s - useful_s - sum(seconds.values()))
    ranks = {step: max(m.detail["ranks"] for m in steps if m.detail["step"] == step) for step in first_s}
    return {
        "wall_s": wall_s,
        "goodput": useful_s / wall_s if has_ended else None,
        "step_s": own_step_s,
        "redone": sum(max(each.values()) - 1 for each in count.values()),
        "left_out": RANKS * STEPS - sum(ranks.values()),
        "seconds": seconds,
        "digests": sorted({mark.detail["digest"] for mark in marks if mark.what == "end"}),
    }


class Runs:
    """The runs that are made, and those that an earlier call has made and written down.

    Args:
        results: where they are written, each when it has ended; None: nowhere.
        resume: whether those that lie there are kept.
    """

    def __init__(self, results: Path | None, resume: bool) -> None:
        self._results, self._machine = results, machine(["torch", "checkpointless"])
        self.made: list[Outcome] = []
        if resume and results is not None and results.exists():
            self.made = [Outcome(**each) for each in json.loads(results.read_text())["runs"]]

    def find(self, side: str, seed: int, kinds: Sequence[str]) -> Outcome | None:
        """Return a run; the seed of one without faults does not matter."""
        same = (each for each in self.made if each.side == side and sorted(each.kinds) == sorted(kinds))
        return next((each for each in same if each.seed == seed or not kinds), None)

    def make(self, side: str, python: str, seed: int, kinds: Sequence[str], base: Path) -> None:
        """Make a run, unless it is made."""
        if self.find(side, seed, kinds) is not None:
            return
        began, load = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), os.getloadavg()[0]
        marks, began_s = train(side, python, seed, kinds, base / f"{side}-{seed}-{len(kinds)}")
        calm = self.find("torchrun", seed, ())
        found = judge(marks, began_s, None if calm is None else calm.step_s)
        self.made.append(Outcome(side, seed, list(kinds), began, [load, os.getloadavg()[0]], **found))
        progress(str(self.made[-1]))
        if self._results is not None:
            results = {"machine": self._machine, "runs": [asdict(each) for each in self.made]}
            self._results.write_text(json.dumps(results, indent=1) + "\n")

    def ends_as(self, run: Outcome) -> str:
        """Say whether a run has ended as its side's undisturbed one, or as one with nothing but the flip."""
        calm = self.find(run.side, run.seed, ())
        if len(run.digests) != 1 or calm is None:
            return "no"
        if run.digests == calm.digests:
            return "yes"
        for side in FLIPPED:  # sides whose undisturbed runs end alike compute alike
            same, flipped = self.find(side, run.seed, ()), self.find(side, run.seed, FLIP)
            if same is not None and same.digests == calm.digests and flipped is not None:
                return "but for the flip" if run.digests == flipped.digests else "no"
        return "no"


def show(runs: Runs, sides: Sequence[str], seeds: Sequence[int]) -> None:
    """Print the table."""
    causes = ("startup", *KINDS, "other")
    columns = ("seed", "side", "goodput", "wall", "steps redone", "batches left out", "as undisturbed", *causes)
    print(f"\n| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|")
    for seed, side in itertools.product(seeds, sides):
        run = runs.find(side, seed, KINDS)
        if run is None:
            continue
        share = "not ended" if run.goodput is None else f"{100 * run.goodput:.1f} %"
        lost = {cause: f"{seconds:.1f}" for cause, seconds in run.seconds.items()}
        if side not in LOOKS and "corrupted" in lost:
            lost["corrupted"] = "unseen"
        row = [str(seed), side, share, f"{run.wall_s:.1f}", str(run.redone), str(run.left_out), runs.ends_as(run)]
        print(f"| {' | '.join([*row, *(lost.get(cause, '-') for cause in causes)])} |")
    calm = {side: runs.find(side, seeds[0], ()) for side in sides}
    steps = ", ".join(f"{side} {run.step_s:.3f} s" for side, run in calm.items() if run is not None)
    print(f"a step of an undisturbed run: {steps}")
    for seed in seeds:
        drawn = ", ".join(f"{each.kind} at step {each.step} on rank {each.rank}" for each in schedule(seed))
        print(f"seed {seed}: {drawn}")


def main() -> None:
    """Run all sides, each undisturbed and with each seed's schedule."""
    names = [side.__name__ for side in SIDES]
    options = parser((__doc__ or "").partition(":")[0])
    options.add_argument("--side", choices=names, action="append", help="only this side; may be repeated")
    options.add_argument("--seed", type=int, action="append", help="of a schedule (default: 0 and 1)")
    options.add_argument("--resume", action="store_true", help="keep what the file of --json has")
    args = options.parse_args()
    pythons: dict[str, str] = {}
    for name in args.side or names:
        python = python_of(name)
        if python is None:
            why = f"no {BRIDGE_ENV}, and no .venv-bridge312" if name == "ft_launcher" else "it cannot be installed"
            progress(f"{name} is left out: {why}")
        else:
            pythons[name] = python
    seeds, runs = args.seed or [0, 1], Runs(args.json, args.resume)
    with interruptible(), folder_of_runs(args.keep, "head-to-head-") as base:
        for name, python in pythons.items():
            runs.make(name, python, seeds[0], (), base)
        for seed in seeds:
            for name in (each for each in FLIPPED if each in pythons):
                runs.make(name, pythons[name], seed, FLIP, base)
            for name, python in pythons.items():
                runs.make(name, python, seed, KINDS, base)
    show(runs, list(pythons), seeds)


if __name__ == "__main__":
    main()
