"""How the ranks of a job are laid out: arithmetic after Megatron-core's `parallel_state`, without torch."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

#: Megatron's orders of ranks, the fastest dimension first: NeMo's default, and the order of `use_tp_pp_dp_mapping`.
_ORDER = ("tp", "cp", "ep", "dp", "pp")
_ORDER_PIPELINE_FIRST = ("tp", "cp", "ep", "pp", "dp")


class LayoutError(ValueError):
    """Raised if a layout cannot work; the message is one line that says why."""


@dataclass(frozen=True)
class Layout:
    """The parallel sizes of a job.

    Attributes:
        virtual_pipeline: the number of parts of the model on each pipeline stage.
        sharded: whether the optimizer is Megatron's distributed optimizer.
        micro_batch, global_batch: samples on one rank (1 if not known) and in a whole step (0 if not known).
        pipeline_before_data: the value of `use_tp_pp_dp_mapping`, which makes a pipeline's stages neighbours.
    """

    world_size: int
    ranks_per_node: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int = 1
    instances: int = 1
    sharded: bool = True
    micro_batch: int = 1
    global_batch: int = 0
    pipeline_before_data: bool = False

    @classmethod
    def on_one_node(
        cls, ranks: int, *, tensor: int = 1, pipeline: int = 1, expert: int = 1, instances: int = 2
    ) -> Layout:
        """Return a layout of one node's ranks, of which as many share an expert as a layer."""
        return cls(
            ranks, ranks, tensor=tensor, pipeline=pipeline, expert=expert, expert_tensor=tensor, instances=instances
        )

    @property
    def nodes(self) -> int:
        """The number of nodes; the last one may have fewer ranks."""
        return math.ceil(self.world_size / self.ranks_per_node)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The parallel sizes above 1, by Megatron's names: tp, pp, cp, ep."""
        sizes = {"tp": self.tensor, "pp": self.pipeline, "cp": self.context, "ep": self.expert}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def text(self) -> str:
        """A description for people."""
        sizes = ",".join(f"{name}={size}" for name, size in self.sizes.items()) or "data parallel"
        return f"{self.world_size} ranks, {sizes}" + (f", {self.instances} holders" if self.instances != 2 else "")

    @property
    def data(self) -> int:
        """The data-parallel size: the number of ranks that read different samples."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """The number of ranks that hold the same experts."""
        return self.world_size // (self.expert_tensor * self.expert * self.pipeline)

    @property
    def shards(self) -> int:
        """The number of parts into which one optimizer instance cuts all parameters but the experts'."""
        return self.data * self.context // self.instances if self.sharded else 1

    @property
    def expert_shards(self) -> int:
        """The number of parts into which one optimizer instance cuts the experts' parameters."""
        return self.expert_data // self.instances if self.sharded else 1

    @property
    def microbatches(self) -> int:
        """The number of microbatches of each rank in a step."""
        return self.global_batch // (self.micro_batch * self.data)

    def groups(self, sizes: dict[str, int], together: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the groups of ranks that differ only in `together`, as Megatron's rank generator makes them."""
        order = _ORDER_PIPELINE_FIRST if self.pipeline_before_data else _ORDER
        strides = dict(zip(order, itertools.accumulate((sizes[name] for name in order), operator.mul, initial=1)))

        def offsets(names: Sequence[str]) -> list[int]:
            steps = ([index * strides[name] for index in range(sizes[name])] for name in names)
            return sorted(sum(parts) for parts in itertools.product(*steps))

        inside = offsets([name for name in order if name in together])
        outside = offsets([name for name in order if name not in together])
        return [tuple(first + each for each in inside) for first in outside]

    def replica_groups(self) -> list[tuple[int, ...]]:
        """Return the groups of ranks that hold the same part of model and optimizer state, each sorted.

        Without the distributed optimizer, a rank is in one group for dense parameters and in one for its experts.
        """
        experts = self.groups(self._expert_sizes(), ("dp",))
        if self.sharded:
            return sorted(_across(experts, self.instances))
        dense = self.groups(self._dense_sizes(), ("cp", "dp"))
        return sorted({*dense, *(experts if self.expert > 1 else ())})

    def replicas(self, rank: int) -> frozenset[int]:
        """Return the ranks that hold all of the state that `rank` holds, including `rank`."""
        return frozenset.intersection(*(frozenset(group) for group in self.replica_groups() if rank in group))

    def holders(self) -> tuple[int, int]:
        """Return how many ranks train the same dense layers and the same experts; zeros if the sizes do not fit."""
        dense, rest = divmod(self.world_size, self.tensor * self.pipeline)
        experts, rest_of_experts = divmod(self.world_size, self.expert_tensor * self.expert * self.pipeline)
        return (0, 0) if rest or rest_of_experts or dense % self.context else (dense, experts)

    def nodes_for(self, replicas: int) -> int:
        """Return the smallest number of nodes that can hold so many replicas, but not fewer than there are now."""
        ranks = math.lcm(
            self.tensor * self.pipeline * math.lcm(self.context, replicas),
            self.expert_tensor * self.expert * self.pipeline * replicas,
        )
        step = ranks // math.gcd(ranks, self.ranks_per_node)
        return math.ceil(self.world_size / self.ranks_per_node / step) * step

    def lost_with_a_node(self) -> list[tuple[int, ...]]:
        """Return the replica groups that have all their ranks on one node, and so are lost with it."""
        return [
            group for group in self.replica_groups() if len({rank // self.ranks_per_node for rank in group}) == 1
        ]

    def check(self, layers: int | None = None, heads: int | None = None) -> None:
        """Raise, with one line that says why, if this layout cannot work; Megatron's checks come late and terse."""
        world, model = self.world_size, self.tensor * self.pipeline * self.context
        experts = self.expert_tensor * self.expert * self.pipeline
        stages = self.pipeline * self.virtual_pipeline
        both = self.data * self.context
        one_step = self.micro_batch * self.data
        checks = [
            (world, model, f"{world} ranks cannot be cut into models of {model} ranks"),
            (world, experts, f"{world} ranks cannot be cut into sets of experts of {experts} ranks"),
            (heads or 0, self.tensor, f"{heads} attention heads cannot be shared by {self.tensor} ranks"),
            (layers or 0, stages, f"{layers} layers cannot be shared by {stages} pipeline stages"),
            (both, self.instances, f"{both} data-parallel ranks cannot hold {self.instances} optimizer instances"),
            (
                self.expert_data,
                self.instances,
                f"{self.expert_data} holders of an expert cannot hold {self.instances} optimizer instances",
            ),
            (
                self.global_batch,
                one_step,
                f"a global batch of {self.global_batch} is not a multiple of {self.micro_batch} x "
                f"{self.data} ranks",
            ),
        ]
        for whole, part, message in checks:
            if not part or whole % part:
                raise LayoutError(message)
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise LayoutError("virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size above 1")
        if self.sharded and self.instances > 1:
            dense = sorted(_across(self.groups(self._dense_sizes(), ("cp", "dp")), self.instances))
            if dense != self.replica_groups():
                raise LayoutError(
                    "experts and other weights would have different replicas: make the data-parallel size "
                    f"({self.data}) a multiple of {self.instances} instances"
                )

    def _dense_sizes(self) -> dict[str, int]:
        return {"tp": self.tensor, "cp": self.context, "ep": 1, "dp": self.data, "pp": self.pipeline}

    def _expert_sizes(self) -> dict[str, int]:
        experts = {"tp": self.expert_tensor, "cp": 1, "ep": self.expert}
        return experts | {"dp": self.expert_data, "pp": self.pipeline}


def _across(groups: Sequence[tuple[int, ...]], instances: int) -> Iterator[tuple[int, ...]]:
    """Cut each group into one run per instance, and join the ranks that stand at the same place of each run."""
    for group in groups:
        run = len(group) // instances
        yield from (group[place::run] for place in range(run))
