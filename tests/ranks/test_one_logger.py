"""Test that telemetry that NeMo starts on rank 0 does not keep a restart from training on."""

import os
from pathlib import Path
from types import ModuleType

import pytest

from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo]


def train(callbacks: ModuleType, steps: int, interrupted: bool) -> None:
    callbacks.on_train_start(train_iterations_start=0, train_samples_start=0)
    for step in range(steps):
        callbacks.on_training_single_iteration_start()
        if interrupted and step == steps - 1:
            return
        callbacks.on_training_single_iteration_end()
    callbacks.on_train_end()


def train_through_a_fault(folder: str) -> None:
    """Switch OneLogger on as NeMo does on rank 0, and train twice."""
    from nv_one_logger.api.config import OneLoggerConfig
    from nv_one_logger.core.internal.singleton import SingletonMeta
    from nv_one_logger.training_telemetry.api import callbacks
    from nv_one_logger.training_telemetry.api.config import TrainingTelemetryConfig
    from nv_one_logger.training_telemetry.api.training_telemetry_provider import TrainingTelemetryProvider

    from checkpointless.integrations.lightning.frameworks.nemo import _switch_off_one_logger

    os.chdir(folder)  # OneLogger writes there what it logs
    SingletonMeta._instances.clear()
    config = OneLoggerConfig(
        application_name="nemo", session_tag_or_fn="test", enable_for_current_rank=True, world_size_or_fn=1
    )
    provider = TrainingTelemetryProvider.instance()
    provider.with_base_config(config).with_export_config().configure_provider()
    callbacks.on_app_start()
    provider.set_training_telemetry_config(
        TrainingTelemetryConfig(perf_tag_or_fn="test", global_batch_size_or_fn=8)
    )
    train(callbacks, 3, interrupted=True)
    _switch_off_one_logger()
    _switch_off_one_logger()
    train(callbacks, 3, interrupted=False)


def test_after_a_fault_one_logger_is_off(nemo_zygote: Zygote, tmp_path: Path) -> None:
    nemo_zygote.run(1, "tests.ranks.test_one_logger:train_through_a_fault", {"folder": str(tmp_path)})
