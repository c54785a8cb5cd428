"""Test that the scales of FP8 layers become buffers, and that layers of an unknown kind are refused."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs Megatron-core")

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.megatron.state import MegatronTensors, _Buffers

pytestmark = pytest.mark.nemo


class State:
    def __init__(self, tensors: int, history: int = 2) -> None:
        self.scale, self.amax_history = torch.ones(tensors), torch.zeros(history, tensors)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {}

    def init_fp8_meta_tensors(self, recipe: object) -> None:
        products = self.fp8_meta["num_gemms"]
        self.fp8_meta.setdefault("scaling_fwd", State(3 * products))
        self.fp8_meta.setdefault("scaling_bwd", State(2 * products))


class GroupedLinear(Layer):
    num_gemms = 4


class DotProductAttention(Layer):
    """Quantises nothing unless it is asked to."""


class Unknown(Layer):
    def init_fp8_meta_tensors(self, recipe: object) -> None:
        self.fp8_meta["scaling_fwd"] = SimpleNamespace(amax_history=torch.zeros(2, 3))


class Foreign(Layer):
    init_fp8_meta_tensors = None  # type: ignore[assignment]


def model(*layers: torch.nn.Module, fp8: str | None = "hybrid", recipe: str = "delayed") -> torch.nn.Module:
    chunk = torch.nn.Sequential(torch.nn.Linear(2, 2), *layers)
    chunk.config = SimpleNamespace(fp8=fp8, fp8_recipe=recipe)  # type: ignore[assignment]
    return chunk


def test_scales_and_histories_are_buffers_in_the_same_memory_and_not_saved() -> None:
    layer = Layer()
    chunk = model(layer)
    _Buffers([chunk])
    buffers = dict(chunk.named_buffers())
    assert sorted(buffers) == [
        f"1.checkpointless_scaling_{way}_{name}" for way in ("bwd", "fwd") for name in ("amax_history", "scale")
    ]
    assert buffers["1.checkpointless_scaling_fwd_scale"] is layer.fp8_meta["scaling_fwd"].scale
    assert sorted(chunk.state_dict()) == ["0.bias", "0.weight"]


def test_what_a_step_has_changed_is_taken_back() -> None:
    layer = Layer()
    tensors = MegatronTensors([model(layer)], None)
    layer.fp8_meta["scaling_fwd"].scale.fill_(3.0)
    kept = tensors.buffers.take()
    layer.fp8_meta["scaling_fwd"].scale.fill_(5.0)
    layer.fp8_meta["scaling_bwd"].amax_history.fill_(7.0)
    tensors.buffers.put(kept)
    assert layer.fp8_meta["scaling_fwd"].scale.tolist() == [3.0] * 3
    assert layer.fp8_meta["scaling_bwd"].amax_history.sum() == 0


def test_a_large_history_that_a_kernel_has_written_is_copied_again() -> None:
    layer = GroupedLinear()
    tensors = MegatronTensors([model(layer)], None)
    history = torch.zeros(100_000, 3)  # more than a mebibyte
    layer.fp8_meta["scaling_fwd"].amax_history = history
    tensors.buffers.take()
    version = history._version
    ctypes.memset(history.data_ptr(), 0x3F, history.nbytes)
    assert history._version == version
    kept = tensors.buffers.take()
    assert torch.equal(kept["model", 0, "1.checkpointless_scaling_fwd_amax_history"], history)


def test_histories_that_are_too_large_to_be_kept_are_refused() -> None:
    layer = Layer()
    layer.fp8_meta["scaling_fwd"] = State(3, history=400_000)
    with pytest.raises(UnrecoverableError, match="set fp8_amax_history_len to less"):
        _Buffers([model(layer)])


@pytest.mark.parametrize(
    "chunk", [model(Layer(), fp8=None), model(Layer(), recipe="tensorwise"), model(DotProductAttention())]
)
def test_layers_that_keep_no_scales_are_left_alone(chunk: torch.nn.Module) -> None:
    _Buffers([chunk])
    assert dict(chunk.named_buffers()) == {}
    assert all(layer.fp8_meta == {} for layer in chunk.modules() if isinstance(layer, Layer))


@pytest.mark.parametrize("layer", [Unknown(), Foreign()])
def test_a_layer_that_keeps_its_scales_elsewhere_is_refused(layer: Layer) -> None:
    with pytest.raises(UnrecoverableError, match=rf"FP8 scales of 1 \({type(layer).__name__}\).*set fp8=None"):
        _Buffers([model(layer)])
