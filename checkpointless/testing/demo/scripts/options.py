"""The options that all scripts of the demo take."""

import argparse

from checkpointless.recovery import CheckpointManager
from checkpointless.transfer.transfer import MEMORY_BUDGET_BYTES


def parse(description: str, *strategies: str) -> argparse.Namespace:
    """Return the options of the command line.

    Args:
        description: what the script does.
        *strategies: the values that ``--strategy`` may have; none: there is no such option.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--dropout", type=float, default=0.0, help="in [0, 1)")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline-parallel size")
    parser.add_argument("--holders", type=int, default=2, help="ranks that hold each shard")
    parser.add_argument("--workers", type=int, default=0, help="workers of each data loader")
    parser.add_argument("--checksum", action="store_true", help="compare replicas before a recovery")
    parser.add_argument(
        "--bucket-bytes", type=int, default=MEMORY_BUDGET_BYTES, help="for the buffers of a transfer"
    )
    if strategies:
        parser.add_argument("--strategy", choices=strategies, default=strategies[0])
    return parser.parse_args()


def manager(options: argparse.Namespace) -> CheckpointManager:
    """Return the checkpoint manager that ``options`` ask for."""
    return CheckpointManager(enable_checksum=options.checksum, memory_budget_bytes=options.bucket_bytes)
