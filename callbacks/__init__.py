"""Lightning callbacks of checkpointless."""

from checkpointless.callbacks.checkpointless_callback import CheckpointlessCallback
from checkpointless.callbacks.fault_injection import HPFaultInjectionCallback
from checkpointless.callbacks.step_recorder import StepRecorder

__all__ = ["CheckpointlessCallback", "HPFaultInjectionCallback", "StepRecorder"]
