"""Make Megatron's process groups at the real world size of a layout, in one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from checkpointless.system.layout import Layout


@contextmanager
def megatron(layout: Layout, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> Iterator[dict[str, list[Any]]]:
    """Make the groups at the real world size; yield, by name, the ranks of all groups, also of other ranks'."""
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state

    made: dict[str, list[Any]] = {}
    create = parallel_state.create_group

    def note(ranks: Any = None, *args: Any, group_desc: str = "", **kwargs: Any) -> Any:
        made.setdefault(group_desc, []).append(tuple(ranks))
        return create(ranks, *args, group_desc=group_desc, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(parallel_state, "create_group", note)
        with as_rank(layout, rank):
            yield made


@contextmanager
def as_rank(layout: Layout, rank: int) -> Iterator[None]:
    """Act as one rank of a job, as far as Megatron's process groups tell, although there is no other rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            num_distributed_optimizer_instances=layout.instances,
            order="tp-cp-ep-pp-dp" if layout.pipeline_before_data else "tp-cp-ep-dp-pp",
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
