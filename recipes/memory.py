"""How much memory the state of a training job takes on each GPU, and how much of it the replicas cost.

The bytes per parameter are those that Megatron-core documents for its distributed optimizer
(https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/dist_optimizer.html), where d is the number
of ranks that share one copy of the optimizer: 6 + 12/d for bf16 parameters with fp32 gradients, 4 + 16/d for 16-bit
parameters with 16-bit gradients, and 8 + 8/d for fp32 parameters. Activations, the buffers of collectives and what
CUDA itself takes are not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from omegaconf import DictConfig, OmegaConf

from checkpointless.system.layout import Layout

GIB = 2**30

# Bytes per trained parameter: Adam's two moments in fp32; with 16-bit parameters also a master copy in fp32, and
# with 16-bit gradients also a copy of the gradients for the update.
_ADAM = 8
_MASTER = 4


@dataclass(frozen=True)
class Count:
    """The numbers of parameters on one GPU.

    Attributes:
        total: the number of all parameters.
        trained: the number of parameters that have gradients and an optimizer.
    """

    total: int
    trained: int


@dataclass(frozen=True)
class Stage:
    """The parameters on each GPU of one pipeline stage.

    Attributes:
        dense: the parameters that every rank of its data-parallel group holds.
        expert: the parameters that only the ranks of its expert-data-parallel group hold.
        whole: the number of parameters of the stage on all of its GPUs together, each counted once.
    """

    dense: Count
    expert: Count
    whole: int


@dataclass(frozen=True)
class Precision:
    """The size of one number, in bytes.

    Attributes:
        parameter: the size of a parameter: 2 for bf16 and fp16, 4 for fp32.
        gradient: the size of an element of the buffer in which gradients are summed.
    """

    parameter: int
    gradient: int

    @property
    def optimizer(self) -> int:
        """The optimizer state per parameter, in bytes, before it is sharded."""
        if self.parameter == 4:
            return _ADAM
        return _ADAM + _MASTER + (_MASTER if self.gradient == 2 else 0)


@dataclass(frozen=True)
class Memory:
    """The memory that the state takes on one GPU, in bytes.

    Attributes:
        parameters, gradients, optimizer: what each of these takes.
        main_parameters: the part of the optimizer that is a copy of the parameters in fp32.
        replica: the part of the optimizer that the replicas cost.
    """

    parameters: int
    gradients: int
    optimizer: int
    main_parameters: int
    replica: int

    @property
    def total(self) -> int:
        """The memory of the whole state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The most that a rank takes on its GPU while it builds a model again and holds the old state.

        First the parameters exist twice, in the new modules and in the buffer that these are moved into; then the
        new main parameters come on top of the held optimizer, whose moments are taken over. Parameters that are
        their own main parameters are held as well.
        """
        held = self.optimizer if self.main_parameters else self.parameters + self.optimizer
        return self.parameters + self.gradients + held + max(self.parameters, self.main_parameters)


def memory(stage: Stage, layout: Layout, precision: Precision) -> Memory:
    """Return the memory that the state takes on each GPU of a pipeline stage.

    Args:
        stage: the parameters of the stage.
        layout: the layout of the job.
        precision: the precision of the job.
    """
    parameters = (stage.dense.total + stage.expert.total) * precision.parameter
    gradients = (stage.dense.trained + stage.expert.trained) * precision.gradient
    optimizer = _optimizer(stage, layout, precision)
    mains = _MASTER * optimizer // precision.optimizer if precision.parameter < 4 else 0
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        main_parameters=mains,
        replica=optimizer - _optimizer(stage, replace(layout, instances=1), precision),
    )


def fullest(stages: Sequence[Stage], layout: Layout, precision: Precision) -> tuple[int, Memory]:
    """Return the number of the pipeline stage whose GPUs hold the most, and the memory on each of them."""
    sizes = [memory(stage, layout, precision) for stage in stages]
    index = max(range(len(sizes)), key=lambda number: sizes[number].total)
    return index, sizes[index]


def precision_of(config: DictConfig) -> Precision:
    """Return the precision in which a recipe trains: that of its plugin, or fp32."""
    kind = str(OmegaConf.select(config, "trainer.plugins.precision", default="32"))
    if kind.startswith(("bf16", "16")):
        wide = OmegaConf.select(config, "trainer.plugins.grad_reduce_in_fp32", default=True)
        return Precision(parameter=2, gradient=4 if wide else 2)
    return Precision(parameter=4, gradient=4)


def _optimizer(stage: Stage, layout: Layout, precision: Precision) -> int:
    shared = (
        (stage.dense.trained, layout.shards),
        (stage.expert.trained, layout.expert_shards),
    )
    return sum(-(-trained * precision.optimizer // parts) for trained, parts in shared)
