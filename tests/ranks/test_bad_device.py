"""Test real jobs with a device check, which a rank that was killed passes or does not."""

from pathlib import Path
from typing import Any

import pytest

from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.steps import read_steps
from tests.ranks.agent_job import Job
from tests.ranks.jobs import assert_same
from tests.ranks.test_agent_nodes import Nodes

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

SCRIPT = "plain_habits.py"
STEPS = 8
ARGS = (str(STEPS), "none")
FAULT = "sigkill@before_optimizer:rank=2,step=4"
WHY = "the device check exited with 1: a row of rank 2 is bad"


class CheckedNodes(Nodes):
    """A job of two nodes of two ranks each; node 1's device check fails, those of the others note what they see."""

    def __init__(self, run_dir: Path, folder: Path, *faults: str, **options: Any) -> None:
        self.seen = folder / "seen"
        self._check = folder / "check.sh"
        self._check.write_text('[ "$1" = 1 ] && echo "a row of rank $RANK is bad" && exit 1; echo "$RANK" >> "$2"')
        options |= {"script": SCRIPT, "record_steps": True, "faults": faults, "device_check_timeout_s": 15.0}
        super().__init__(run_dir, 2, *ARGS, **options)

    def start(self, node: int, **options: Any) -> Job:
        return super().start(node, device_check=f"sh '{self._check}' {node} '{self.seen}'", **options)


def bad_devices(job: Job) -> list[tuple[Any, ...]]:
    found = job.events(EventName.BAD_DEVICE)
    return [(event.rank, event.fields["node_number"], event.fields["remedy"]) for event in found]


def checks(job: Job) -> list[tuple[int | None, int, str]]:
    return [(each.rank, each.node, each.fields["why"]) for each in job.events(EventName.DEVICE_CHECK)]


def test_a_spare_takes_the_place_of_a_node_whose_device_does_not_pass(tmp_path: Path) -> None:
    undisturbed = CheckedNodes(tmp_path / "undisturbed", tmp_path)
    undisturbed.end()
    assert not undisturbed.seen.exists(), "no first start is checked"

    run_dir = tmp_path / "run"
    nodes = CheckedNodes(run_dir, tmp_path, FAULT, spares=1)
    first, given_up, _ = (agent.end(code=code) for agent, code in zip(nodes.agents, (0, 1, 0), strict=True))
    assert f"rank 2: {WHY}" in given_up.err
    assert f"node 1 is given up for a spare: the device of rank 2 must not be used: {WHY}" in first.err
    assert bad_devices(nodes.agents[0]) == [(2, 1, "give_up")]
    assert sorted(nodes.seen.read_text().split()) == ["2", "3"]
    assert sorted(checks(nodes.agents[0])) == [(2, 1, WHY), (2, 2, ""), (3, 2, "")]
    assert_same(read_steps(tmp_path / "undisturbed"), read_steps(run_dir), STEPS)


@pytest.mark.parametrize("passes", [True, False])
def test_without_a_spare_the_rank_is_started_with_a_warning_unless_its_device_passes(
    tmp_path: Path, passes: bool
) -> None:
    command = f"sh -c 'echo a row of rank $RANK is bad; exit {int(not passes)}'"
    job = Job(tmp_path / "run", SCRIPT, *ARGS, faults=(FAULT,), device_check=command)
    ended = job.end()
    assert checks(job) == [(2, 0, "" if passes else WHY)]
    assert bad_devices(job) == ([] if passes else [(2, 0, "try")])
    assert ("rank 2 is started on it once more" in ended.err) is not passes
