"""The command line."""

from checkpointless.cli.command_line import main

__all__ = ["main"]
