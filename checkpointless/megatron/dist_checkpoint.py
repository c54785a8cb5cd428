"""Megatron-core's ``dist_checkpointing`` with copies: strategies that save and load ``torch_dist`` checkpoints.

The save strategy keeps a copy of what each rank writes, and the load strategy takes from storage only what no copy
has, each chunk once.
"""

from checkpointless.integrations.megatron.dist_checkpoint.copies import Copies, process_copies
from checkpointless.integrations.megatron.dist_checkpoint.strategies import (
    CopiesLoadStrategy,
    CopiesSaveStrategy,
    DrainError,
    LoadError,
    are_defaults,
    register,
    unregister,
)

__all__ = [
    "Copies",
    "CopiesLoadStrategy",
    "CopiesSaveStrategy",
    "DrainError",
    "LoadError",
    "are_defaults",
    "process_copies",
    "register",
    "unregister",
]
