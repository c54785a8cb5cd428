"""Test which of Megatron's optimizers and precisions the guarded update refuses."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs Megatron-core")

from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.megatron import state, update
from checkpointless.integrations.megatron.update import GuardedUpdate, _obstacles, check_contexts
from checkpointless.recovery.guard import UpdateGuard

pytestmark = pytest.mark.nemo


class Optimizer:
    is_stub_optimizer = True
    optimizer = None

    def __init__(self, **config: Any) -> None:
        self.config = SimpleNamespace(**config)


def distributed(params: list[Any], **attributes: Any) -> Any:
    optimizer = object.__new__(DistributedOptimizer)
    optimizer.config, optimizer.is_stub_optimizer = SimpleNamespace(), False  # type: ignore[assignment]
    optimizer.optimizer = SimpleNamespace(param_groups=[{"params": params}])
    vars(optimizer).update(attributes)
    return optimizer


def obstacle(optimizer: Any, *chunks: torch.nn.Module) -> str | None:
    return next(_obstacles(optimizer, chunks), None)


IN_BYTES: dict[str, Any] = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.uint8}
OFFLOADED: Any = Optimizer()
OFFLOADED.optimizer = object.__new__(HybridDeviceOptimizer)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (
            Optimizer(overlap_param_gather_with_optimizer_step=True),
            "overlap_param_gather_with_optimizer_step=False",
        ),
        (Optimizer(**IN_BYTES), "set exp_avg_dtype to torch.float32 or torch.bfloat16"),
        (OFFLOADED, "optimizer_cpu_offload=False"),
    ],
)
def test_what_cannot_be_guarded_is_refused_with_what_to_set(optimizer: Optimizer, says: str) -> None:
    tensors: Any = SimpleNamespace(optimizer=optimizer, modules=[])
    with pytest.raises(UnrecoverableError, match=says):
        GuardedUpdate(tensors, UpdateGuard(tensors, tensors))


@pytest.mark.parametrize("overflows", [False, True])
def test_a_step_that_is_skipped_is_committed_and_not_applied(overflows: bool) -> None:
    optimizer, done = Optimizer(), list[str]()
    vars(optimizer)["prepare_grads"] = lambda: overflows

    def guarded(make: Callable[[], bool]) -> bool:
        done.extend(("committed",) if make() else ())
        return True

    def apply() -> bool:
        done.append("applied")
        return True

    tensors: Any = SimpleNamespace(optimizer=optimizer, modules=[], apply=apply, gather=lambda late: None)
    update = GuardedUpdate(tensors, guarded)  # type: ignore[arg-type]
    assert update.prepare_grads() or update()
    assert done == (["committed"] if overflows else ["applied", "committed"])


def test_a_precision_that_cannot_be_recovered_is_refused() -> None:
    chunks: list[Any] = [torch.nn.Linear(1, 1) for _ in range(2)]
    for chunk in chunks:
        chunk.config = SimpleNamespace(fp8="hybrid", fp4=None)
    assert obstacle(Optimizer(), *chunks) is None
    chunks[1].config.fp4 = "e2m1"
    assert "set fp4=None" in str(obstacle(Optimizer(), *chunks))


@pytest.fixture
def in_fp8(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """Return a module whose weight Megatron takes for a parameter in FP8."""
    chunk = torch.nn.Linear(1, 1)
    for module in (state, update):
        monkeypatch.setattr(module, "is_float8tensor", lambda each: each is chunk.weight)
    return chunk


MAIN = [torch.zeros(1)]


@pytest.mark.parametrize(
    ("make", "recipe", "says"),
    [
        (lambda _: Optimizer(use_precision_aware_optimizer=True), "", "set use_precision_aware_optimizer=False"),
        (lambda _: Optimizer(), "", "set use_distributed_optimizer=True"),
        (lambda weight: distributed([weight]), "", "set params_dtype"),
        (lambda _: distributed(MAIN, grad_scaler=object()), "delayed", "set loss_scale=None"),
        (lambda _: distributed(MAIN, grad_scaler=object()), "tensorwise", None),
        (lambda _: distributed(MAIN, grad_scaler=None), "delayed", None),
    ],
)
def test_what_cannot_be_derived_in_fp8_is_refused(in_fp8: Any, make: Any, recipe: str, says: str | None) -> None:
    in_fp8.config = SimpleNamespace(fp8="hybrid", fp8_recipe=recipe) if recipe else None
    found = obstacle(make(in_fp8.weight), in_fp8)
    assert found is None if says is None else says in str(found)
    in_fp8.weight.requires_grad_(False)
    assert "frozen parameters in FP8: set fp8_param_gather=False" in str(obstacle(make(in_fp8.weight), in_fp8))


def test_a_megatron_that_quantises_otherwise_is_refused(in_fp8: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DistributedOptimizer, "_get_fp8_params_and_shard_fp32_from_fp8")
    assert "does not know how this Megatron-core quantises" in str(obstacle(distributed([]), in_fp8))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"cuda_graph_impl": "none", "gradient_accumulation_fusion": False}, None),
        ({"gradient_accumulation_fusion": True}, "gradient_accumulation_fusion=True: set it to False"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl='local': set it to 'none'"),
    ],
)
def test_gradients_that_pass_no_hook_are_known(config: dict[str, Any], reason: str | None) -> None:
    chunk: Any = SimpleNamespace(config=SimpleNamespace(**config))
    assert check_contexts(None, [chunk])  # nothing is checked
    said = re.escape(f"does not see gradients with {reason} (or")
    with pytest.raises(UnrecoverableError, match=said) if reason else nullcontext():
        assert check_contexts(2, [chunk])
