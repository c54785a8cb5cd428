"""Compositions of aborts: the default one, changes to it, and its order."""

from __future__ import annotations

from collections.abc import Callable

from checkpointless.inprocess.abort.base import Abort
from checkpointless.inprocess.abort.communicators import HPAbortTorchDistributed
from checkpointless.inprocess.abort.trainer import HPCheckpointingAbort, HPDataLoaderAbort
from checkpointless.inprocess.abort.transformer_engine import AbortTransformerEngine
from checkpointless.inprocess.compose import Compose
from checkpointless.inprocess.state import HPState


class CheckpointlessAbortManager:
    """Creates and changes compositions of aborts."""

    @staticmethod
    def get_default_checkpointless_abort() -> Compose:
        """Return the aborts for TransformerEngine, checkpoint writers, torch.distributed and data loaders.

        They run from last to first.
        """
        return Compose(
            AbortTransformerEngine(), HPCheckpointingAbort(), HPAbortTorchDistributed(), HPDataLoaderAbort()
        )

    @staticmethod
    def create_custom_abort(*abort_instances: Abort) -> Compose:
        """Compose only the given aborts.

        Raises:
            ValueError: no abort was given.
        """
        if not abort_instances:
            raise ValueError("create_custom_abort() needs at least one abort instance")
        return Compose(*abort_instances)

    @staticmethod
    def override_abort(abort_compose: Compose, abort_type: type, new_abort: Abort) -> Compose:
        """Return a copy of ``abort_compose`` in which ``new_abort`` replaces the instances of ``abort_type``.

        Raises:
            ValueError: ``abort_compose`` is not a composition, or holds no ``abort_type``.
        """
        if not hasattr(abort_compose, "instances"):
            raise ValueError("abort_compose has no 'instances': pass a Compose")
        if not any(isinstance(each, abort_type) for each in abort_compose.instances):
            raise ValueError(f"{abort_compose!r} holds no {abort_type.__name__} to replace")
        return Compose(*(new_abort if isinstance(each, abort_type) else each for each in abort_compose.instances))


def communicators_first(abort: Callable[[HPState], object]) -> Callable[[HPState], object]:
    """Reorder a composition so that it aborts communicators first (``early_abort_communicator``)."""
    if not isinstance(abort, Compose):
        return abort
    first = [each for each in abort.instances if isinstance(each, HPAbortTorchDistributed)]
    rest = [each for each in abort.instances if not isinstance(each, HPAbortTorchDistributed)]
    return Compose(*rest, *first)


def after_block(abort: Callable[[HPState], object], state: HPState) -> None:
    """Run the ``after_block`` of an abort or of a composition's aborts, in the main thread, after the block."""
    for each in reversed(abort.instances) if isinstance(abort, Compose) else (abort,):
        if isinstance(each, Abort):
            each.after_block(state)
