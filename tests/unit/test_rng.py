"""Streams come back bit for bit, from memory and from bytes."""

from __future__ import annotations

import random

import numpy as np
import torch

from checkpointless.recovery.rng import RngSource, RngStates, register_rng_source


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_streams_come_back() -> None:
    random.gauss(0, 1)  # leaves a second value pending inside the generator
    np.random.standard_normal()
    states = RngStates.capture(loss=1.25, at_batch_start=True)
    first = draw()
    draw()
    copied = RngStates.from_bytes(states.to_bytes())
    copied.restore()
    assert draw() == first
    states.restore()
    assert draw() == first
    assert (copied.loss, copied.at_batch_start) == (1.25, True)


def test_registered_sources_are_taken_too() -> None:
    own = {"state": torch.arange(4, dtype=torch.uint8)}
    register_rng_source("own", RngSource(lambda: dict(own), own.update))
    states = RngStates.from_bytes(RngStates.capture().to_bytes())
    own["state"] = torch.zeros(4, dtype=torch.uint8)
    states.restore()
    assert own["state"].tolist() == [0, 1, 2, 3]
