"""The tiny recipe trains on CPU in every parallel layout, with dropout on, and a repeat ends in the same bytes."""

from typing import Any

import pytest

from tests.ranks.layouts import DROPOUT, EP2, PP2, TP2
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo]

STEPS = 4
MOE = list(EP2)
# name -> (ranks, overrides)
LAYOUTS = {
    "dp4": (4, []),
    "tp2-dp2": (4, [*TP2]),
    "pp2-dp2": (4, [*PP2]),
    "tp2-pp2-dp2": (8, [*TP2, *PP2]),
    "ep2-dp4": (4, MOE),
}


def _train(zygote: Zygote, ranks: int, overrides: list[str], times: int = 1) -> list[list[dict[str, Any]]]:
    """Return one list per run in the same processes, with what the run ended in on each rank."""
    arguments = {"overrides": [f"trainer.max_steps={STEPS}", *overrides], "times": times}
    by_rank = zygote.run(ranks, "tests.ranks.tiny_gpt:train", arguments)
    return [list(run) for run in zip(*by_rank)]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=() if name == "pp2-dp2" else pytest.mark.long)  # below are tensor-parallel ranks
        for name in LAYOUTS
    ],
)
def test_layout_trains_and_repeats_bit_for_bit(nemo_zygote: Zygote, layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    overrides = [*overrides, *DROPOUT]
    first, again = _train(nemo_zygote, ranks, overrides, times=2)
    assert again == first, "running main() again in the same processes ends in other bytes"
    assert _train(nemo_zygote, ranks, overrides) == [first], "fresh processes end in other bytes"

    losses = [float.fromhex(loss) for loss in first[0]["losses"]]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5
    for rank, result in enumerate(first):
        assert result["steps"] == STEPS
        # NeMo tells the loss to the last pipeline stage and to rank 0; the others log 0.
        if any(float.fromhex(loss) for loss in result["losses"]):
            assert result["losses"] == first[0]["losses"]
        assert result["consumed_samples"] == STEPS * 16
        for other in result["data_group"]:
            if "ep2" not in layout:
                assert first[other]["params"] == result["params"], f"ranks {rank} and {other} hold one model"
        assert len(result["replica_group"]) == 2
        for other in result["replica_group"]:
            if "ep2" not in layout:
                assert first[other]["optimizer"] == result["optimizer"], f"ranks {rank} and {other} hold one shard"
    every_sample = sorted(sample for result in _data_owners(first) for sample in result["samples"])
    assert every_sample == list(range(STEPS * 16))


def _data_owners(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of one rank of each data-parallel index: those of the first data-parallel group."""
    return [results[rank] for rank in results[0]["data_group"]]


def test_dropout_uses_the_device_streams_and_leaves_the_cpus_alone(nemo_zygote: Zygote) -> None:
    (results,) = _train(nemo_zygote, 4, [*TP2, *DROPOUT])
    for result in results:
        changed = {name for name, state in result["rng"].items() if result["rng_at_start"][name] != state}
        assert changed == {"cuda", "model-parallel-rng"}
    tensor_parallel = results[0]["rng"], results[1]["rng"]
    assert tensor_parallel[0]["cuda"] == tensor_parallel[1]["cuda"]
    assert tensor_parallel[0]["model-parallel-rng"] != tensor_parallel[1]["model-parallel-rng"]


@pytest.mark.long
def test_weights_initialised_on_the_device_differ_between_tensor_parallel_ranks(nemo_zygote: Zygote) -> None:
    overrides = [*TP2, "model.config.use_cpu_initialization=false"]
    (results,) = _train(nemo_zygote, 4, overrides)
    assert results[0]["params"] == results[2]["params"]
    assert results[0]["params"] != results[1]["params"]
    for result in results:
        assert result["rng_at_start"]["model-parallel-rng"] != result["rng_at_start"]["data-parallel-rng"]
