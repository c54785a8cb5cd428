"""Test that DDP's lasting buckets are made without anything that a user's model would notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from checkpointless.integrations.torch.torch_tensors import TorchTensors, _settle_buckets

pytestmark = pytest.mark.usefixtures("alone")


def test_sparse_embeddings_hooks_and_frozen_parameters_are_left_alone() -> None:
    embedding, middle, last = torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    inner = torch.nn.Sequential(embedding, middle, last)
    last.bias.requires_grad_(False)
    model = DistributedDataParallel(inner)
    seen: list[torch.Tensor] = []
    middle.weight.register_hook(seen.append)
    middle.weight.register_post_accumulate_grad_hook(seen.append)
    _settle_buckets([model])
    assert not seen
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    assert len(seen) == 2
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse
    assert model._get_ddp_logging_data()["has_rebuilt_buckets"]


def test_ddp_gives_all_ranks_the_same_buffers_at_the_same_forward_passes_after_a_fault() -> None:
    """It does not in the pass after one without gradients: a validation of Lightning's goes through it."""

    def make() -> tuple[Any, TorchTensors]:
        model = DistributedDataParallel(torch.nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, TorchTensors([model], [optimizer], is_known=True)

    (model, tensors), (again, restored) = make(), make()
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            model(torch.randn(3, 2))
        assert model.will_sync_module_buffers() is is_training
        restored.restore(tensors.capture()())
        assert again.will_sync_module_buffers() is is_training
