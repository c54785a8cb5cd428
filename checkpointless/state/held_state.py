"""The state that a rank holds between two generations: taken from the old trainer, given to the new one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.replication.host_memory import HostMemoryPool, recorded
from checkpointless.replication.parts import Content
from checkpointless.state.journal import StepJournal
from checkpointless.state.port import SnapshotPoint, StepSnapshot, TrainingState, split
from checkpointless.state.serialization.digest import MemoryChecksumManager, samples
from checkpointless.state.serialization.tensor_memory import is_on_host, local_part
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key

_WRITTEN = (
    "{} was written to since the fault: what the block trains must be built in it, "
    "and nothing may be written to it before the recovery"
)
logger = logging.getLogger(__name__)


@dataclass
class HeldState:
    """The state that a rank holds between two generations.

    Attributes:
        commit: the step that the state belongs to, and whether the update of the next step can still be applied.
        tensors: references to the old model's and optimizer's tensors, not copies, without their gradients. Each is
            replaced by its successor as soon as that is filled, so that this is the whole state at every point.
        moments: the rest of the state, at every point after the committed step that can be resumed at.
        digests: the digest of each part of the rank's shard, by its replica group, if replicas are to be compared.
        journal: the old training's journal, while its update can still be applied; else nothing holds the training.
        buffers: the rank's own buffers, at every point after the committed step and after the step that follows it.
            They are whole even if an update failed half-way.
        samples: a few elements of each tensor but buffers, as they were at the newest fault.
        gradients: the parameters with the gradients of the update that can still be applied.
        is_used: whether a recovery has begun since, which may write to the tensors.
        is_superseded: whether the ranks have decided that replicas fill this one.
        given_up: why the state was given up, for people ("": it was not).
        has_replicas: whether other ranks hold all that this one holds, if its update can still be applied.
        memory: what keeps the host memory that tensors were moved to from being used for others.
    """

    commit: CommitState
    tensors: dict[Key, torch.Tensor]
    moments: Mapping[SnapshotPoint, StepSnapshot]
    digests: dict[Group, str] | None = None
    journal: StepJournal | None = None
    fit: int = 1
    offset: int = 0
    buffers: Mapping[tuple[int, SnapshotPoint], Mapping[Key, torch.Tensor]] = field(default_factory=dict)
    samples: Mapping[Key, bytes] = field(default_factory=dict)
    gradients: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    is_used: bool = False
    is_superseded: bool = False
    has_replicas: bool = False
    given_up: str = ""
    memory: list[Content] = field(default_factory=list)

    def go_back_to(self, stage: SnapshotPoint) -> dict[str, Any]:
        """Hold the state as it was at ``stage``, drop all other points, and return its non-tensor state."""
        moment = self.moments[stage]
        self.moments = {stage: moment}
        self.tensors.update({key: copy for key, copy in moment.buffers.items() if key in self.tensors})
        return moment.objects

    def let_trainer_go(self) -> None:
        """Record that no update can be applied any more, and drop the old trainer."""
        self.commit = CommitState(self.commit.committed, ready=False, torn=self.commit.torn)
        self.journal, self.gradients = None, []

    def give_up(self, reason: str) -> None:
        """Hold nothing that another rank could be given: replicas fill this one."""
        logger.error("this rank's state is given up: %s", reason)
        self.given_up = reason
        self.let_trainer_go()
        self.tear()

    def tear(self) -> None:
        self.commit = CommitState(self.commit.committed, ready=False, torn=True)

    def use(self) -> None:
        """Begin a recovery. What a script has written to since the fault is given up.

        A model from outside of the block may get other weights at its entry: DDP sends those of a new process.
        """
        if not self.is_used and not self.commit.torn:
            self._give_up_what_is_written()
        self.is_used = True

    def outlive(self, memory_is_short: bool = False) -> None:
        """Stay what is held over a further fault; if memory was short, give up what replicas have.

        The old trainer takes as much as the new one: an update that is still to be made is given up, and the state
        if replicas cannot fill the rank next to it. What may exist only here is kept.
        """
        if memory_is_short and self.journal is not None and self.has_replicas:
            logger.warning("memory does not suffice beside a trainer that has an update to make: it is given up")
            self.let_trainer_go()
        elif memory_is_short and self.is_superseded:
            self.give_up("memory does not suffice beside it, and replicas fill this rank")
            self.tensors.clear()
        if not self.commit.torn:
            if not self.is_used:
                self._give_up_what_is_written()
            self.note()
        self.is_used = False

    def note(self) -> None:
        """Note a few elements of all tensors but buffers: a script that is entered again may write to them."""
        buffers = {key for copies in self.buffers.values() for key in copies}
        buffers.update(key for moment in self.moments.values() for key in moment.buffers)
        self.samples = samples({key: each for key, each in self._watched().items() if key not in buffers})

    def _watched(self) -> dict[Key, torch.Tensor]:
        """Return what nobody may write to before the recovery: the tensors, and gradients that are still needed."""
        return {
            **self.tensors,
            **{("gradient", str(at)): local_part(each) for at, (_, each) in enumerate(self.gradients)},
        }

    def _give_up_what_is_written(self) -> None:
        watched = self._watched()
        now = samples({key: watched[key] for key in self.samples if key in watched})
        written = next((key for key, sample in now.items() if sample != self.samples[key]), None)
        if written is not None:
            self.give_up(_WRITTEN.format(written[-1] if isinstance(written[-1], str) else "a parameter"))

    @classmethod
    def of(
        cls,
        journal: StepJournal,
        commit: CommitState,
        checksums: MemoryChecksumManager,
        fit: int,
        offset: int,
        is_frozen: Callable[[Key], bool] = lambda key: False,
    ) -> HeldState:
        """Hold a training's state, unless code outside the update changed it; ``is_frozen``: never updated."""
        changed = journal.changed() if not commit.torn else ""
        if changed:
            logger.error("this rank's state is given up: %s", changed)
            commit = CommitState(commit.committed, ready=False, torn=True)
        state, moments = journal.state, {} if commit.torn else dict(journal.snapshots(commit.committed))
        digests = None
        if checksums.enabled and not commit.torn and commit.committed >= 0:
            frozen = {key: tensor for key, tensor in state.tensors().items() if is_frozen(key)}
            parts = split(state, {**frozen, **state.shard()})
            digests = {group: checksums.digest_all(part) for group, part in parts.items()}
        buffers = {
            (step, stage): copies
            for step in (commit.committed, commit.committed + 1)
            for stage, copies in journal.buffers(step).items()
        }
        held = cls(
            commit,
            _without_gradients(state),
            moments,
            digests,
            journal if commit.ready else None,
            fit,
            offset,
            buffers,
        )
        held.given_up = changed
        held.has_replicas = held.journal is not None and len(state.holders()) > 1
        if held.journal is not None:
            held.gradients = state.gradients()
        if not commit.torn:
            held.note()
        return held

    def redo(self, target: int) -> None:
        """Apply the gradients of ``target`` that the old optimizer still holds, unless that was done before."""
        if self.commit.committed == target:
            return
        journal = self.journal
        if journal is None:
            raise RuntimeError(f"step {target} is to be applied from gradients that this rank no longer holds")
        # If the update is interrupted, the shard belongs to no step and is refilled; afterwards it is the target's.
        self.commit = CommitState(target - 1, ready=False, torn=True)
        others = [parameter.grad for parameter, _ in self.gradients]  # of a trainer that has the same module now
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        journal.finish_update()
        for (parameter, _), other in zip(self.gradients, others, strict=True):
            parameter.grad = other
        self.gradients = []
        self.tensors = _without_gradients(journal.state)
        self.moments = dict(journal.snapshots(target))
        self.digests = None  # they belonged to the step before
        self.commit = CommitState(target, ready=False, torn=False)

    def snapshots(self, redone: int | None) -> Mapping[SnapshotPoint, StepSnapshot]:
        """Return the state apart from the tensors as it will be after ``redone`` is applied; None: as it is."""
        if redone is not None and self.journal is not None:
            return self.journal.snapshots(redone)
        return self.moments

    def offload(self, pool: HostMemoryPool) -> None:
        """Move tensors on a device to the host, but numbers: where they lie tells an optimizer its kernel."""
        moved = {key: tensor for key, tensor in self.tensors.items() if tensor.dim() and not is_on_host(tensor)}
        copied = pool.copy(Content(b"", tuple(moved.values())), recorded())
        self.tensors.update(zip(moved, copied.tensors))
        used = {tensor.untyped_storage().data_ptr() for tensor in self.tensors.values()}
        made = [*self.memory, copied]
        self.memory = [each for each in made if used & {t.untyped_storage().data_ptr() for t in each.tensors}]


def _without_gradients(state: TrainingState) -> dict[Key, torch.Tensor]:
    """Return the tensors of ``state`` without gradients (Megatron's are views of a buffer)."""
    return {key: tensor.detach() for key, tensor in state.tensors().items()}
