"""What Megatron-core keeps in globals is dropped, and its random streams are taken and put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs Megatron-core")

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import cuda_graphs

from checkpointless.integrations.megatron import cleanup

pytestmark = pytest.mark.nemo


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> CudaRNGStatesTracker:
    made = CudaRNGStatesTracker()
    monkeypatch.setattr(cleanup, "get_cuda_rng_tracker", lambda: made)
    return made


def draw(state: torch.Tensor | torch.Generator) -> list[float]:
    if isinstance(state, torch.Tensor):
        generator = torch.Generator()
        generator.set_state(state)
        return torch.rand(3, generator=generator).tolist()
    return torch.rand(3, generator=state).tolist()


@pytest.mark.parametrize("for_graphs", [False, True], ids=["tensors", "generators"])
def test_streams_are_taken_and_put_back(tracker: CudaRNGStatesTracker, for_graphs: bool) -> None:
    """A tracker for CUDA graphs keeps generators, from which its graphs draw: they must stay the same objects."""

    def fresh(seed: int) -> dict[str, Any]:
        generators = {name: torch.Generator().manual_seed(seed + index) for index, name in enumerate("ab")}
        return generators if for_graphs else {name: each.get_state() for name, each in generators.items()}

    tracker.set_states(fresh(1))
    taken = cleanup._tracker_states()
    expected = {name: draw(state) for name, state in tracker.get_states().items()}

    tracker.set_states(fresh(7))  # another generation has set its tracker up
    present = tracker.get_states()
    cleanup._set_tracker_states(taken)
    states = tracker.get_states()
    if for_graphs:
        assert all(states[name] is present[name] for name in "ab")
    assert {name: draw(state) for name, state in states.items()} == expected


@pytest.fixture
def record() -> Iterator[Any]:
    made: Any = cuda_graphs._CudagraphGlobalRecord
    yield made
    made.cudagraph_created, made.cudagraph_record = False, []


@pytest.mark.parametrize("created", [True, False])
def test_graphs_of_the_generation_that_is_over_are_dropped(record: Any, created: bool) -> None:
    """Megatron asserts, when it captures the next generation's, that there are none."""
    runner = object.__new__(cuda_graphs._CudaGraphRunner)
    recorded = [] if created else [(runner, "fwd")]
    record.cudagraph_created, record.cudagraph_record = created, recorded
    cleanup._drop_globals()
    assert (record.cudagraph_created, record.cudagraph_record) == (False, [])


def test_no_process_group_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron forgets most of its groups itself."""
    name = "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"
    monkeypatch.setattr(parallel_state, name, torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 1))
    cleanup._drop_globals()
    assert getattr(parallel_state, name) is None
