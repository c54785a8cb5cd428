"""Megatron-core's ``dist_checkpointing`` with copies."""

from checkpointless.integrations.megatron.dist_checkpoint import (
    Copies,
    CopiesLoadStrategy,
    CopiesSaveStrategy,
    DrainError,
    LoadError,
    are_defaults,
    process_copies,
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
