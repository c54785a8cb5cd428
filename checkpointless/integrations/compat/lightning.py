"""Lightning's private names, each with the versions in which it was seen (2.4.0, which NeMo asks for, and 2.6.6).

Supporting another version means looking each of them up. Attributes are still named where they are used;
``python -m tests.unit.project.private_names`` lists those.
"""

from __future__ import annotations

# Protocol of loaders whose position Lightning saves (2.4.0, 2.6.6); what tells a loader's sampler its epoch.
from lightning.fabric.utilities.data import _set_sampler_epoch as set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful as Stateful

# The loops of a fit, which are subclassed (2.4.0, 2.6.6: 2.5 has new names for where a restart begins).
from lightning.pytorch.loops import _FitLoop as FitLoop
from lightning.pytorch.loops import _TrainingEpochLoop as TrainingEpochLoop
from lightning.pytorch.loops.fetchers import _DataFetcher as DataFetcher

# Automatic optimization, which is subclassed, and what its closure runs (2.4.0, 2.6.6).
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization as AutomaticOptimization

# How hooks are called that load a checkpoint's parts (2.4.0, 2.6.6).
from lightning.pytorch.trainer.call import _call_callbacks_load_state_dict as call_callbacks_load_state_dict
from lightning.pytorch.trainer.call import _call_callbacks_on_load_checkpoint as call_callbacks_on_load_checkpoint
from lightning.pytorch.trainer.call import _call_lightning_datamodule_hook as call_datamodule_hook
from lightning.pytorch.trainer.call import _call_lightning_module_hook as call_module_hook

# What a trainer restores a checkpoint with, which is subclassed (2.4.0; 2.6.6 has ``weights_only``).
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector as CheckpointConnector

# The results that ``log`` accumulates over an epoch (2.4.0, 2.6.6).
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata as Metadata
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync as Sync


def without_zero_grad(closure: Closure) -> Closure:
    """Return what runs the pass of ``closure`` and leaves gradients from before it."""
    return Closure(closure._step_fn, closure._backward_fn)
