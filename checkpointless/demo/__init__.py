"""The demo: a small NeMo GPT on real text, trained through faults, and the proof that nothing was lost."""

from checkpointless.demo.config import DemoConfig, DemoError, parse_layout

__all__ = ["DemoConfig", "DemoError", "parse_layout"]
