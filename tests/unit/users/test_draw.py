"""The chaos of users' runs draws only what a run must survive."""

from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.users_chaos.draw import FEATURES, PLAIN_FEATURES, draw
from checkpointless.faults.spec import DEADLY, HANGING, NODES, SETUP_PHASES, parse, parse_all

SEEDS = st.integers(0, 10**6)


@given(SEEDS, st.integers(0, 300))
@example(7, 132)  # it loses a node in the second of two fits
@example(5, 97)  # it resumes late and stops early: there is no step in which a node can be lost
def test_every_fault_can_happen(seed: int, number: int) -> None:
    case = draw(seed, number)
    assert case.faults
    assert set(case.features) <= {*FEATURES, *PLAIN_FEATURES}
    parse_all(list(case.faults), case.layout.world_size, max(case.steps))
    if len(case.steps) > 1:  # the state that a second fit begins with has a number of its own
        assert case.steps[0] + 1 not in {parse(spec).step for spec in case.faults if parse(spec).kind in NODES}
    kinds = {parse(spec).kind.value for spec in case.faults}
    assert "dataloader" not in kinds or "workers" in case.features


@given(SEEDS, st.integers(0, 300))
def test_a_shard_never_loses_all_its_holders(seed: int, number: int) -> None:
    case = draw(seed, number)
    lost: dict[int, set[int]] = {}  # its keys are the steps that are being made
    for spec in map(parse, case.faults):
        assert spec.rank is not None
        assert spec.step is not None
        if spec.kind in (*DEADLY, *HANGING):
            step = spec.step + 1 if spec.phase in SETUP_PHASES else spec.step
            lost.setdefault(step, set()).add(spec.rank)
        if spec.kind in NODES:
            lost.setdefault(spec.step, set()).update((2, 3))
    for ranks in lost.values():
        assert all(case.layout.replicas(rank) - ranks for rank in ranks)
