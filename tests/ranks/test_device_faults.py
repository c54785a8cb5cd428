"""Test every kind of fault in every phase of a step and of a set-up, in real NeMo jobs on the test device."""

from collections import Counter
from dataclasses import dataclass

import pytest

from checkpointless.faults.spec import DEADLY, HANGING, SETUP_PHASES, FaultKind, FaultPhase
from tests.ranks.jobs import Trainings
from tests.ranks.nemo_zygote import ROOT

# Per commit test_device.py has a device assert, which ends in a wait for the device, whatever the phase.
pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(600)]

SCRIPT = str(ROOT / "tests" / "device" / "train.py")
SETTINGS = {"heartbeat_timeout_s": 10.0, "limit_s": 400.0}
STEPS = 10
LAYOUTS = {
    "dp4": (4, ("--features", "overlap", "--graphs")),
    "tp2-pp2": (8, ("--tensor-parallel", "2", "--pipeline-parallel", "2")),
}
KINDS = (FaultKind.EXCEPTION, FaultKind.OOM, *DEADLY, *HANGING, FaultKind.CUDA)
REPLACED = {*DEADLY, *HANGING, FaultKind.CUDA}
STEP_PHASES = tuple(phase for phase in FaultPhase if phase not in SETUP_PHASES)
FAULTS_OF_A_JOB = 4


@dataclass(frozen=True)
class Case:
    layout: str
    kind: FaultKind
    phases: tuple[FaultPhase, ...]
    name: str

    def faults(self) -> tuple[list[str], Counter[int]]:
        """Return the specs, at every other step and in every other rank, and the ranks that are replaced."""
        specs, replaced = [], Counter[int]()
        ranks, _ = LAYOUTS[self.layout]
        for index, phase in enumerate(self.phases):
            step, rank = 2 + 2 * index, (1 + 2 * index) % ranks
            if phase is FaultPhase.TRANSFER:  # while its replica is filled
                specs.append(f"sigkill@forward:rank={rank ^ 2},step={step}")
                replaced[rank ^ 2] += 1
            elif phase in SETUP_PHASES:  # in the set-up after another fault
                specs.append(f"exception@forward:rank={(rank + 1) % ranks},step={step}")
            step -= phase in SETUP_PHASES
            specs.append(f"{self.kind.value}@{phase.value}:rank={rank},step={step}")
            replaced[rank] += self.kind in REPLACED
        return specs, +replaced


def cases() -> list[Case]:
    found = []
    for layout in LAYOUTS:
        for kind in KINDS:
            steps = [phase for phase in STEP_PHASES if phase in kind.phases]
            for first in range(0, len(steps), FAULTS_OF_A_JOB):
                phases = tuple(steps[first : first + FAULTS_OF_A_JOB])
                found.append(Case(layout, kind, phases, f"{kind.value}-{phases[0].value}"))
            setup = tuple(phase for phase in FaultPhase if phase in SETUP_PHASES & kind.phases)
            if kind in REPLACED:  # who sends is the last holder, and must not be lost
                setup = tuple(phase for phase in setup if phase is not FaultPhase.TRANSFER)
            if setup:
                found.append(Case(layout, kind, setup, f"{kind.value}-setup"))
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.layout}-{case.name}")
def test_no_fault_changes_a_bit_or_replaces_anybody_healthy(trainings: Trainings, case: Case) -> None:
    faults, replaced = case.faults()
    ranks, args = LAYOUTS[case.layout]
    job = trainings.rough(ranks, ("--steps", str(STEPS), *args), *faults, steps=STEPS)
    respawned = Counter(rank for incident in job.incidents for rank in incident.respawned)
    assert respawned == replaced, job.story()
