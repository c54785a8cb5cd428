"""Test real jobs in which the device of a killed rank turns bad; a module on the path plays NVML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpointless.environment import DEVICE_GUARD_ENV, YES
from checkpointless.faults.ledger import FAULTS_DIR, fired
from checkpointless.report.verify import compare
from checkpointless.telemetry.event_names import EventName
from checkpointless.telemetry.events import read_events
from checkpointless.telemetry.steps import read_steps
from tests.ranks.agent_job import Job
from tests.ranks.test_agent_nodes import NPROC, Nodes

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

FAKE = Path(__file__).parents[1] / "fake_nvml"
STEPS = 8
FAULT = "sigkill@before_optimizer:rank=2,step=4"
BAD = "the driver wants a reset"


class NodesWithDevices(Nodes):
    """A job whose nodes have two devices each; device 0 of node 1 turns bad when the fault is injected.

    Args:
        folder: folder of the files that say what NVML says.
        monkeypatch: sets the environment of the agents.
    """

    def __init__(
        self, run_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *faults: str, **options: Any
    ) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch
        monkeypatch.setenv("PYTHONPATH", str(FAKE))
        monkeypatch.setenv(DEVICE_GUARD_ENV, YES)
        options |= {"script": "plain_batch_norm.py", "record_steps": True, "faults": faults}
        super().__init__(run_dir, 2, str(STEPS), **options)

    def start(self, node: int, **options: Any) -> Job:
        devices: list[dict[str, Any]] = [
            {"uuid": f"GPU-{node}-{n}", "name": "H100", "recovery": 0} for n in range(NPROC)
        ]
        if node == 1:
            devices[0] |= {"when": str(self.run_dir / FAULTS_DIR), "then": {"recovery": 1}}
        path = self._folder / f"nvml-{node}-{len(list(self._folder.glob('nvml-*')))}.json"
        path.write_text(json.dumps({"devices": devices}))
        self._monkeypatch.setenv("FAKE_NVML", str(path))
        return super().start(node, **options)


def bad_devices(run_dir: Path) -> list[tuple[Any, ...]]:
    return [
        (event.rank, event.fields["node_number"], event.fields["remedy"])
        for event in read_events(run_dir)
        if event.stage == EventName.BAD_DEVICE
    ]


def test_a_spare_takes_the_place_of_a_node_whose_device_turned_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = NodesWithDevices(tmp_path / "undisturbed", tmp_path, monkeypatch)
    assert [ended.code for ended in undisturbed.end()] == [0, 0]

    run_dir = tmp_path / "run"
    nodes = NodesWithDevices(run_dir, tmp_path, monkeypatch, FAULT, spares=1)
    first, given_up, spare = nodes.end()
    assert (first.code, spare.code) == (0, 0), first.err + spare.err
    assert fired(run_dir) == {FAULT: 1}
    assert given_up.code == 1
    assert f"of rank 2 must not be used: {BAD}" in given_up.err
    assert "node 1 is given up for a spare: GPU 0 (H100, GPU-1-0) of rank 2" in first.err
    assert bad_devices(run_dir) == [(2, 1, "give_up")]
    respawned = [
        (event.rank, event.node)
        for event in read_events(run_dir)
        if event.stage == EventName.RESPAWN and event.edge == "begin"
    ]
    assert sorted(respawned) == [(2, 2), (3, 2)]  # by the spare's agent, none by that of node 1
    verdict = compare(read_steps(tmp_path / "undisturbed"), read_steps(run_dir))
    assert verdict.equal, verdict.sentence
    assert verdict.steps == STEPS


@pytest.mark.long
def test_without_a_spare_the_device_is_used_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    nodes = NodesWithDevices(run_dir, tmp_path, monkeypatch, FAULT)
    first, second = nodes.end()
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "rank 2 is started on it once more" in first.err
    assert bad_devices(run_dir) == [(2, 1, "try")]
