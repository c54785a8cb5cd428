"""Lightning strategies of checkpointless: NeMo's Megatron strategy and Lightning's own, with recovery.

Each name is loaded on first access: Lightning's strategies need no NeMo.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpointless.integrations.lightning.checkpoints.auto_resume import CheckpointlessAutoResume
    from checkpointless.integrations.lightning.checkpoints.connector import CheckpointlessCompatibleConnector
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
    "enable",
]

_MODULES = {
    "CheckpointlessAutoResume": "integrations.lightning.checkpoints.auto_resume",
    "CheckpointlessCompatibleConnector": "integrations.lightning.checkpoints.connector",
    "CheckpointlessDDPStrategy": "strategies.torch_strategies",
    "CheckpointlessMegatronStrategy": "strategies.megatron_strategy",
    "CheckpointlessModelParallelStrategy": "strategies.torch_strategies",
    "enable": "strategies.nemo_run",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"checkpointless.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
