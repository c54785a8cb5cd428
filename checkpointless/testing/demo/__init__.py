"""The demo: it trains a small GPT on real text through faults, and proves that nothing was lost."""

from checkpointless.testing.demo.config import DemoConfig, parse_layout
from checkpointless.testing.demo.trainers import TRAINERS, DemoError, Trainer

__all__ = ["TRAINERS", "DemoConfig", "DemoError", "Trainer", "parse_layout"]
