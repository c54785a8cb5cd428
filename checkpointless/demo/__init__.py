"""The demo: it trains a small NeMo GPT on real text through faults, and proves that nothing was lost."""

from checkpointless.demo.config import DemoConfig, DemoError, parse_layout

__all__ = ["DemoConfig", "DemoError", "parse_layout"]
