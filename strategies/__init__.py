"""Lightning strategies of checkpointless: NeMo's Megatron strategy and Lightning's own, with recovery.

Each name is loaded on first access: Lightning's strategies need no NeMo.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpointless.integrations.lightning.checkpoints.connector import CheckpointlessCompatibleConnector
    from checkpointless.integrations.lightning.checkpoints.copies import (
        CheckpointlessAutoResume,
        KeepCopies,
        keep_copies,
    )
    from checkpointless.strategies.megatron_strategy import CheckpointlessMegatronStrategy
    from checkpointless.strategies.nemo_run import enable
    from checkpointless.strategies.torch_strategies import (
        CheckpointlessDDPStrategy,
        CheckpointlessModelParallelStrategy,
    )

__all__ = [
    "CheckpointlessAutoResume",
    "CheckpointlessCompatibleConnector",
    "CheckpointlessDDPStrategy",
    "CheckpointlessMegatronStrategy",
    "CheckpointlessModelParallelStrategy",
    "KeepCopies",
    "enable",
    "keep_copies",
]

_MODULES = {
    "CheckpointlessAutoResume": "integrations.lightning.checkpoints.copies",
    "CheckpointlessCompatibleConnector": "integrations.lightning.checkpoints.connector",
    "CheckpointlessDDPStrategy": "strategies.torch_strategies",
    "CheckpointlessMegatronStrategy": "strategies.megatron_strategy",
    "CheckpointlessModelParallelStrategy": "strategies.torch_strategies",
    "KeepCopies": "integrations.lightning.checkpoints.copies",
    "enable": "strategies.nemo_run",
    "keep_copies": "integrations.lightning.checkpoints.copies",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"checkpointless.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
