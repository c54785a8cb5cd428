"""A data module that writes down each of its set-ups, and draws random numbers in it."""

from __future__ import annotations

import os

import torch

from checkpointless.demo.text import TextDataModule
from checkpointless.environment import own_run_dir


class LoggedText(TextDataModule):
    """The demo's text, with a set-up that leaves a line in the run directory."""

    def setup(self, stage: str = "") -> None:
        """Write a line, and draw random numbers, some of which decide about the samples' order."""
        run_dir = own_run_dir()
        assert run_dir is not None
        with (run_dir / "setups").open("a") as file:
            file.write(f"{os.environ['RANK']}\n")
        torch.rand(3)
        self.seed = int(torch.randint(1000, (), generator=torch.Generator().manual_seed(self.seed)))
        super().setup(stage)
