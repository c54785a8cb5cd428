"""What is told about a tensor comes back as it was, and says which tensors it fits."""

from __future__ import annotations

import json

import pytest
import torch

from checkpointless.transfer.tensor_entry import TensorEntry


@pytest.mark.parametrize("tensor", [torch.ones(2, 3), torch.tensor(1), torch.empty(0, 4, dtype=torch.bfloat16)])
@pytest.mark.parametrize("digest", [None, 2**64 - 1])
def test_an_entry_survives_json(tensor: torch.Tensor, digest: int | None) -> None:
    entry = TensorEntry.of(("optimizer", 0, "exp_avg"), tensor, digest)
    assert TensorEntry.from_json(json.loads(json.dumps(entry.to_json()))) == entry
    assert entry.nbytes == tensor.nbytes


def test_an_entry_fits_tensors_of_its_dtype_and_shape() -> None:
    entry = TensorEntry.of(("model", 0, "weight"), torch.ones(2, 3))
    assert entry.fits(torch.zeros(3, 2).t())
    assert not entry.fits(torch.zeros(3, 2))
    assert not entry.fits(torch.zeros(2, 3, dtype=torch.float16))
    assert not entry.fits(None)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown dtype 'float31'"):
        TensorEntry.from_json([["a"], "float31", [2], "cpu", None])
