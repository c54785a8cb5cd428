"""What the state of a training job takes on each GPU, and what of it the replicas cost.

Bytes per parameter as Megatron-core documents them for its distributed optimizer
(https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/dist_optimizer.html), where d is the number
of ranks that share one copy of the optimizer: bf16 parameters with fp32 gradients 6 + 12/d, 16-bit ones with 16-bit
gradients 4 + 16/d, fp32 ones 8 + 8/d. Activations, the buffers of collectives and what CUDA takes are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from omegaconf import DictConfig, OmegaConf

from checkpointless.recipes.layout import Layout

GIB = 2**30

# Per parameter that is trained: Adam's two moments in fp32; with 16-bit parameters a master copy in fp32 as well,
# and with 16-bit gradients a copy of those too, for the update.
_ADAM = 8
_MASTER = 4


@dataclass(frozen=True)
class Count:
    """Parameters on one GPU.

    Attributes:
        total: of them all.
        trained: those that have gradients and an optimizer.
    """

    total: int
    trained: int


@dataclass(frozen=True)
class Stage:
    """The parameters on each GPU of one pipeline stage.

    Attributes:
        dense: what every rank of its data-parallel group holds.
        expert: what only the ranks of its expert-data-parallel group hold.
        whole: the parameters of the stage on all of its GPUs together, each once.
    """

    dense: Count
    expert: Count
    whole: int


@dataclass(frozen=True)
class Precision:
    """Bytes of one number.

    Attributes:
        parameter: 2 for bf16 and fp16, 4 for fp32.
        gradient: of the buffer that gradients are summed in.
    """

    parameter: int
    gradient: int

    @property
    def optimizer(self) -> int:
        """Bytes of optimizer state per parameter, before it is shared."""
        if self.parameter == 4:
            return _ADAM
        return _ADAM + _MASTER + (_MASTER if self.gradient == 2 else 0)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Attributes:
        parameters, gradients, optimizer: what each takes.
        optimizer_without_replicas: what the optimizer would take with one instance.
    """

    parameters: int
    gradients: int
    optimizer: int
    optimizer_without_replicas: int

    @property
    def total(self) -> int:
        """All of the state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def replica(self) -> int:
        """What the replicas cost."""
        return self.optimizer - self.optimizer_without_replicas


def memory(stage: Stage, layout: Layout, precision: Precision) -> Memory:
    """What the state takes on each GPU of a pipeline stage.

    Args:
        stage: its parameters.
        layout: of the job.
        precision: likewise.
    """
    parameters = (stage.dense.total + stage.expert.total) * precision.parameter
    gradients = (stage.dense.trained + stage.expert.trained) * precision.gradient
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=_optimizer(stage, layout, precision),
        optimizer_without_replicas=_optimizer(stage, replace(layout, instances=1), precision),
    )


def fullest(stages: Sequence[Stage], layout: Layout, precision: Precision) -> tuple[int, Memory]:
    """The pipeline stage whose GPUs hold most, and what that is."""
    sizes = [memory(stage, layout, precision) for stage in stages]
    index = max(range(len(sizes)), key=lambda number: sizes[number].total)
    return index, sizes[index]


def precision_of(config: DictConfig) -> Precision:
    """In what precision a recipe trains: that of its plugin, or fp32."""
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
