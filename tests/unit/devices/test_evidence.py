"""Test which last words of a process blame its device."""

import pytest

from checkpointless.devices.evidence import blames_device


@pytest.mark.parametrize(
    ("words", "blames"),
    [
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: device-side assert triggered", False),
        ("cuda:3 did not synchronize within 30 s", False),
        ("RuntimeError: No CUDA GPUs are available: no CUDA-capable device is detected", True),
        ("CUDA error: uncorrectable NVLink error detected during the execution", True),
        ("cuda:3 is not healthy: CUDA error: uncorrectable ECC error encountered", True),
        ("ncclUnhandledCudaError: Call to CUDA function failed. unhandled cuda error", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("CUDA error: out of memory", False),
        ("the parameter update lock was not released within 60 s", False),
        ("ValueError: the loss is not a number", False),
        ("", False),
    ],
)
def test_words(words: str, blames: bool) -> None:
    assert blames_device(words) is blames
