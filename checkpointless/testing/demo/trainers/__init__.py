"""The trainers that the demo can show, by name."""

from checkpointless.testing.demo.trainers.loops import (
    BRIDGE_GPT,
    DDP,
    HSDP,
    LIGHTNING_DDP,
    LIGHTNING_HSDP,
    MEGATRON_LOOP,
)
from checkpointless.testing.demo.trainers.nemo import NeMo
from checkpointless.testing.demo.trainers.trainer import DemoError, Program, Task, Trainer

__all__ = ["TRAINERS", "DemoError", "Program", "Task", "Trainer"]

#: By name; the first is the default.
TRAINERS: dict[str, Trainer] = {
    each.name: each for each in (NeMo(), DDP, HSDP, MEGATRON_LOOP, BRIDGE_GPT, LIGHTNING_DDP, LIGHTNING_HSDP)
}
