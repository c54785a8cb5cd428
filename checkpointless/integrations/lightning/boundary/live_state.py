"""The training state of a trainer: its strategy's tensors and what Lightning keeps beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.lightning.boundary.epoch_metrics import Accumulated
from checkpointless.integrations.lightning.boundary.kinds import ACCUMULATED, of_save_hooks, take_state
from checkpointless.integrations.lightning.boundary.plain_attributes import kept_states
from checkpointless.integrations.lightning.boundary.steps import TrainedTensors
from checkpointless.integrations.lightning.data.position import DataPosition, begun_at
from checkpointless.integrations.lightning.data.stateful import without_worker_seeds
from checkpointless.state.evidence import Evidence, Witness, is_same
from checkpointless.state.live_state import DATA, Built
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.later import Later
from checkpointless.state.snapshot import UPDATED_BUFFERS, SnapshotPoint, StepSnapshot
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key, TensorEntry

_AT_THE_BEGINNING = DataPosition(0, 0)


class _Taken(Later[dict[str, Any]]):
    """What was taken at a moment, but for the buffers; it is put into its form when that is asked for.

    Args:
        make: makes the non-tensor state.
        buffers: copies of the buffers.
    """

    __slots__ = ("buffers",)

    def __init__(self, make: Callable[[], dict[str, Any]], buffers: Mapping[Key, torch.Tensor]) -> None:
        super().__init__(make)
        self.buffers = buffers


class TrainerLiveState:
    """The state of one trainer, as :class:`checkpointless.state.live_state.LiveState` asks for it.

    The strategy reports every moment of a step to this object, which then takes what a later step changes.

    Args:
        trainer: a trainer whose strategy has been set up.
        tensors: the tensors of its model and optimizer.
        position: returns where the training stands in its data. None: always at the beginning.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        tensors: TrainedTensors,
        position: Callable[[], DataPosition] | None = None,
    ) -> None:
        self.trainer = trainer
        self._position = position
        self._tensors = tensors
        self._versions: dict[tuple[int, SnapshotPoint], list[int]] = {}  # of the parameters, at each moment
        self._accumulated: tuple[int, _Taken] | None = None  # the newest step, when the next one had gradients
        self._witness: Witness | None = None
        self._evidence: dict[tuple[int, SnapshotPoint], Evidence] = {}  # of the weights, at each moment
        self._version_of: Callable[[], list[int]] | None = getattr(tensors, "versions", None)
        self._moments: dict[tuple[int, SnapshotPoint], _Taken] = {}
        self._ready: tuple[int, _Taken] | None = None  # the step in the making, and what its commit leaves
        self._update_is_skipped = False
        self._updated_buffers: set[Key] = set()  # those that the update itself writes to
        self.built: Built | None = None  # by the strategy, when all is built
        self._travels: set[SnapshotPoint] = set()  # the stages whose state is known to be fit for another process

    def group(self) -> tuple[int, ...]:
        """Return the ranks that hold all that this rank holds."""
        return self._tensors.group()

    def parts(self, keys: Iterable[Key]) -> Mapping[Group, Sequence[Key]]:
        """Return ``keys`` by the ranks that hold the same under them."""
        return self._tensors.parts(keys)

    def are_reduced(self) -> bool:
        """Return whether the parts are the same on all their holders because they are reduced over them."""
        return self._tensors.are_reduced()

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Return the tensors of model and optimizer that do not follow from others."""
        return self._tensors.tensors()

    def essentials(self) -> dict[Key, torch.Tensor]:
        """Return the tensors from which, with those of all other ranks, the whole state can be made again."""
        return self._tensors.essentials()

    def shard(self) -> dict[Key, torch.Tensor]:
        """Return the tensors that this rank's update owns."""
        return self._tensors.shard()

    # --- while training -------------------------------------------------------------------------------------------

    def copy_buffers(self) -> Mapping[Key, torch.Tensor]:
        """Return copies of this rank's buffers as they are now."""
        return self._tensors.copy_buffers()

    def reached(
        self,
        step: int,
        stage: SnapshotPoint,
        buffers: Mapping[Key, torch.Tensor],
        keep: Callable[[Accumulated], None] | None = None,
    ) -> None:
        """Take the state of the moment that the trainer has reached: ``stage`` after ``step``.

        Args:
            step: the optimizer step.
            stage: the moment after ``step``.
            buffers: copies of the buffers as they are now.
            keep: keeps the random streams and, of what was accumulated over the epoch, what only this rank has.
                None: nothing is kept.

        Raises:
            UnrecoverableError: the state has something in it that could not be given to a new process.
        """
        accumulated = Accumulated(self.trainer)
        moment = self._take(buffers, accumulated)
        if stage not in self._travels:
            try:
                state_tree.check(moment())
            except state_tree.StateTreeError as error:
                raise UnrecoverableError(f"{error}; no new process could be given this state") from error
            self._travels.add(stage)
        if keep is not None:  # first, so that a rank that has a moment also has its streams
            keep(accumulated)
        if stage is SnapshotPoint.ACCUMULATED:
            self._accumulated = step, moment
        else:
            if self._version_of is not None:
                self._versions[step, stage] = self._version_of()
            self._evidence[step, stage] = self._see()
            self._moments = {**self._moments, (step, stage): moment}

    def ready(
        self, step: int, outcome: tuple[bool, Callable[[], dict[str, Any]]], buffers: Mapping[Key, torch.Tensor]
    ) -> None:
        """Take what ``step`` has changed before its commit, now that its gradients are final.

        Args:
            step: the optimizer step in the making.
            outcome: whether the update is made, and what makes plain data of the outcome of the step.
            buffers: copies of the buffers as they are now.
        """
        succeeded, plain = outcome
        self._update_is_skipped = not succeeded
        tensors = self._tensors
        groups, scalers, modules = tensors.take_groups(), tensors.scalers(), tensors.take_modules()
        tensors.mark_buffers()

        def objects() -> dict[str, Any]:
            changed = {"groups": groups(), "scalers": scalers, **modules}
            return {"optimizer": changed, "outcome": plain()}

        self._ready = step, _Taken(objects, buffers)

    def applied(self, step: int) -> Mapping[Key, torch.Tensor] | None:
        """Note that the update of ``step`` is applied: no rank goes back to before it any more.

        Returns:
            Copies of the buffers, if the update itself has written to some of them; else None.
        """
        ready, buffers = self._ready, None
        written = self._tensors.written_buffers() if ready is not None else []
        if ready is not None and written:
            self._updated_buffers.update(written)
            buffers = self._tensors.copy_buffers()
            self._ready = ready[0], _Taken(ready[1], buffers)
        committed = self._committed(step, self._tensors.take_groups())
        if committed is not None:
            if self._version_of is not None:
                self._versions = {(step, SnapshotPoint.COMMITTED): self._version_of()}
            self._evidence = {(step, SnapshotPoint.COMMITTED): self._see()}
            self._moments = {(step, SnapshotPoint.COMMITTED): committed}
            self._ready = self._accumulated = None
        return buffers

    def _committed(
        self, step: int, groups: Callable[[], list[list[dict[str, Any]]]] | None = None
    ) -> _Taken | None:
        """Return what the commit of ``step`` leaves: what the step changed, and the rest as it was before it.

        Args:
            step: the optimizer step.
            groups: makes the values of the param groups after the update; None: they are as before it.
        """
        before = max([key for key in self._moments if key[0] == step - 1], default=None)
        if self._ready is None or self._ready[0] != step or before is None:
            return None
        changed, taken, base = self._ready[1], self._moments[before], before[1]
        if self._accumulated is not None and self._accumulated[0] == step - 1:
            taken, base = self._accumulated[1], SnapshotPoint.ACCUMULATED
        begun = take_state(self.trainer)()["sampler"] if base is SnapshotPoint.LOADED else None

        def objects() -> dict[str, Any]:
            made = {**taken(), **changed(), "base": int(base), UPDATED_BUFFERS: sorted(self._updated_buffers)}
            if base is SnapshotPoint.LOADED:
                made["sampler"] = begun_at(made["sampler"], begun)
            if groups is not None:
                made["optimizer"] = {**made["optimizer"], "groups": groups()}
            return made

        committed = _Taken(objects, changed.buffers)
        if base is SnapshotPoint.COMMITTED:
            committed()  # otherwise each step would hold all those before it
        return committed

    def require_unchanged(self) -> None:
        """Look, when the gradients of a step are final, whether something else than updates changes parameters.

        Raises:
            UnrecoverableError: it does: a fault behind that would find ranks whose state is that of no step.
        """
        reason = self.changed()
        if reason:
            raise UnrecoverableError(reason)

    def changed(self) -> str:
        """Return why the tensors are not those of the newest moment; "" if nothing is known of it."""
        grown = getattr(self._tensors, "grown", None)
        reason: str = grown() if grown is not None else ""
        if reason or not self._evidence or not self._moments:
            return reason
        step, stage = max(self._moments)
        if self._is_as_it_was(step, stage):
            return ""
        return (
            f"parameters were changed beside the update since step {step} ({stage.name.lower()}), for example by "
            "a hook that exchanges or clamps weights, or in the forward pass of an Embedding with max_norm; let "
            "the optimizer's register_step_post_hook do it, or keep such weights as buffers"
        )

    def _is_as_it_was(self, step: int, stage: SnapshotPoint) -> bool:
        """Return whether the parameters are those of ``stage`` after ``step``, as far as it is known."""
        known = self._versions.get((step, stage))
        if known is not None and self._version_of is not None and known != self._version_of():
            return False
        evidence = self._evidence.get((step, stage))
        return evidence is None or is_same(evidence, self._see())

    def _see(self) -> Evidence:
        """Return evidence of the weights as they are now."""
        if self._witness is None:
            self._witness = Witness(self._tensors.shard().values())
        return self._witness.take()

    @property
    def is_under_way(self) -> bool:
        """Whether a fit is being run, and not skipped."""
        return bool(self._moments)

    @property
    def newest_moment(self) -> tuple[int, SnapshotPoint]:
        """The newest step, and the stage that this rank has reached after it."""
        return max(self._moments)

    def newest(self) -> dict[str, Any]:
        """Return the non-tensor state that was taken last."""
        return self._moments[max(self._moments)]()

    def _take(self, buffers: Mapping[Key, torch.Tensor], accumulated: Accumulated) -> _Taken:
        trainer, tensors = self.trainer, self._tensors
        position = self._position() if self._position is not None else _AT_THE_BEGINNING
        state = take_state(trainer)
        groups, scalers, modules = tensors.take_groups(), tensors.scalers(), tensors.take_modules()

        def objects() -> dict[str, Any]:
            made = state()
            return {
                "checkpoint": made["checkpoint"],
                "kinds": {**made["kinds"], ACCUMULATED: accumulated()},
                "sampler": made["sampler"],
                "data": tuple(position),
                "optimizer": {"groups": groups(), "scalers": scalers, **modules},
                "outcome": None,
                "base": None,
            }

        return _Taken(objects, buffers)

    # --- when a fault comes ---------------------------------------------------------------------------------------

    def moments(self, step: int) -> Mapping[SnapshotPoint, StepSnapshot]:
        """Return what was taken after ``step``, and what its commit left of what was taken before it."""
        found = {
            stage: moment
            for (at, stage), moment in self._moments.items()
            if at == step and self._is_as_it_was(at, stage)
        }
        committed = self._committed(step)
        if committed is not None:
            found.setdefault(SnapshotPoint.COMMITTED, committed)
        state = {"state": self._tensors.plain_state(), "spread": self._tensors.spread()}
        return {
            stage: _with_state(StepSnapshot(taken(), taken.buffers), state)
            for stage, taken in sorted(found.items())
        }

    def own_buffers(self, step: int) -> Mapping[SnapshotPoint, Mapping[Key, torch.Tensor]]:
        """Return the buffers at each moment after ``step``; if its update failed or is to come, those before it."""
        found = {stage: moment.buffers for (at, stage), moment in self._moments.items() if at == step}
        if self._ready is not None and self._ready[0] == step:
            found.setdefault(SnapshotPoint.COMMITTED, self._ready[1].buffers)
        return found

    def own_parts(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the states of data loaders, data module, callbacks and module, by name."""
        checkpoint = objects["checkpoint"]
        loops = checkpoint["loops"] or {}
        loaders = loops.get("fit_loop", {}).get("state_dict", {}).get("combined_loader")
        kept = kept_states(self.trainer)
        parts: dict[str, Any] = {
            f"the state of {key}": state for key, state in checkpoint["callbacks"].items() if key not in kept
        }
        if loaders:
            parts[f"{DATA} (loaders)"] = without_worker_seeds(loaders)
        datamodule = getattr(self.trainer, "datamodule", None)
        if type(datamodule).__qualname__ in checkpoint:
            parts[f"{DATA} ({type(datamodule).__qualname__})"] = checkpoint[type(datamodule).__qualname__]
        for key, value in of_save_hooks(self.trainer, checkpoint).items():
            parts[f"what on_save_checkpoint puts into checkpoint[{key!r}]"] = value
        return parts

    def resumed(self, step: int, stage: SnapshotPoint, objects: dict[str, Any]) -> None:
        """Note that tensors and objects are in place as they were at ``stage`` after ``step``."""
        self._versions.clear()  # until the next moment
        self._evidence.clear()
        self._moments = {(step, stage): _Taken(lambda: objects, self._tensors.copy_buffers())}
        self._ready = self._accumulated = None

    def put_buffers_back(self) -> None:
        """Undo what hooks have done to buffers since the state was put in place."""
        for moment in self._moments.values():
            self._tensors.put_buffers(moment.buffers)

    def apply_held_update(self) -> None:
        """Apply the update whose final gradients are held, unless they had overflowed."""
        if self._ready is not None:  # a scheduler that was made since has changed the values of the groups
            ready = self._ready[1]()["optimizer"]
            self._tensors.load_objects({**ready, "state": {}, "spread": self._tensors.spread()})
        if not self._update_is_skipped:
            self._tensors.apply_held_update()
        if self._ready is not None:
            self.applied(self._ready[0])

    def adopt(self, tensors: Mapping[Key, torch.Tensor]) -> set[Key]:
        """Put those of ``tensors`` in place that can be used without a copy, and return their keys."""
        return self._tensors.adopt(tensors)

    def room(self, entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
        """Return storage for ``entries``."""
        return self._tensors.room(entries)

    def join_objects(self, objects: Mapping[Group, Any]) -> dict[str, Any]:
        """Return the objects of the first part, with the optimizer's plain values from holders of each part."""
        values = {group: theirs["optimizer"] for group, theirs in objects.items()}
        return {**objects[min(objects)], "optimizer": self._tensors.join_objects(values)}

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Put the optimizer's plain values back; the strategy and Lightning load the rest."""
        self._tensors.load_objects(objects["optimizer"])

    def settle(self) -> None:
        """Derive before the first step what a recovery derives to other bits than the start. Collective."""
        self._tensors.settle()

    def derive(self) -> None:
        """Derive the parameters from all ranks' shards. Collective."""
        self._tensors.derive()


def _with_state(moment: StepSnapshot, state: Mapping[str, Any]) -> StepSnapshot:
    """Return ``moment`` with the optimizer's plain state, which nothing but an update changes."""
    optimizer = {**moment.objects["optimizer"], **state}
    return StepSnapshot({**moment.objects, "optimizer": optimizer}, moment.buffers)
