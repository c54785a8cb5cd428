"""The abort of collectives."""

from __future__ import annotations

from checkpointless.inprocess.abort.base import Abort
from checkpointless.inprocess.communicators.process_groups import process_groups
from checkpointless.inprocess.state import HPState


class HPAbortTorchDistributed(Abort):
    """Aborts every communicator: NCCL by ``abort()``, gloo by shutting down its connections.

    A rank that is blocked in a collective of either backend raises at once.
    """

    def __call__(self, state: HPState) -> None:
        process_groups.abort()
