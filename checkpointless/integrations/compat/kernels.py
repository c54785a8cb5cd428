"""Kernels in which a GPU waits for its peers where no abort of a communicator reaches it."""

from __future__ import annotations

import os

from checkpointless.system.environment import SPINNING_KERNELS_ENV, YES

#: What a config asks such kernels with: the option, the values that do, whose kernels they are, and what to set.
_ASKED_WITH = (
    ("tp_comm_overlap", (True,), "TransformerEngine's user buffers", "tp_comm_overlap=False"),
    ("moe_enable_deepep", (True,), "DeepEP", "moe_enable_deepep=False, moe_token_dispatcher_type='alltoall'"),
    ("moe_token_dispatcher_type", ("flex",), "DeepEP or HybridEP", "moe_token_dispatcher_type='alltoall'"),
)


def unabortable(config: object) -> str | None:
    """Return why a rank that waits for a lost one could not be freed.

    DeepEP's kernels and those of TransformerEngine's user buffers read flags in a loop that peers write over NVLink
    or RDMA. Aborting NCCL's communicators does not end them; they end the process when their own limit is over.
    After a death all ranks that wait in one would be lost, and with them the state.

    Args:
        config: Megatron's ``TransformerConfig`` or a recipe of it; what it does not have counts as not set.

    Returns:
        One line that says what to set; None if there is no obstacle, or the user accepts it.
    """
    if os.environ.get(SPINNING_KERNELS_ENV) == YES:
        return None
    for option, values, whose, instead in _ASKED_WITH:
        value = getattr(config, option, None)
        if isinstance(value, bool | str) and value in values:
            return (
                f"a rank that waits for a lost one in a kernel of {whose} cannot be freed, and its state is lost: "
                f"set {instead}, or {SPINNING_KERNELS_ENV}=1 to train nevertheless"
            )
    return None
