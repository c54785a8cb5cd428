"""The state that a rank holds between two generations: taken from the old trainer, given to the new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.recovery.host_memory import HostMemory
from checkpointless.recovery.live_state import LiveState
from checkpointless.recovery.moment import Moment, Stage
from checkpointless.serialization import state_tree
from checkpointless.serialization.checksum import MemoryChecksumManager
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.state_tensors import split
from checkpointless.transfer.tensor_entry import Key


@dataclass
class HeldState:
    """The state that a rank holds between two generations.

    Attributes:
        commit: the step that the state belongs to, and whether the update of the next step can still be applied.
        tensors: references to the old model's and optimizer's tensors, not copies, without their gradients. Each
            is replaced by its successor as soon as that is filled, so that at every moment this is the whole state,
            and little of it exists twice.
        moments: the rest of the state, at every moment after the committed step that can be resumed at.
        digests: the digest of each part of the rank's shard, by its replica group, if replicas are to be compared.
        live: the old trainer's state, while its update can still be applied; else nothing holds the old trainer.
        fit: the fit of the block that the state belongs to.
        offset: how many steps of the job precede that fit.
        buffers: the rank's own buffers, at every moment after the committed step and after the step that follows
            it. They are whole even if an update failed half-way.
        built_upon: whether a model that is built uses some of the tensors: what fills that changes these.
    """

    commit: CommitState
    tensors: dict[Key, torch.Tensor]
    moments: Mapping[Stage, Moment]
    digests: dict[Group, str] | None = None
    live: LiveState | None = None
    fit: int = 1
    offset: int = 0
    buffers: Mapping[tuple[int, Stage], Mapping[Key, torch.Tensor]] = field(default_factory=dict)
    built_upon: bool = False

    def go_back_to(self, stage: Stage) -> dict[str, Any]:
        """Hold the state as it was at ``stage``, and drop all other moments.

        Returns:
            The non-tensor state of that moment.
        """
        moment = self.moments[stage]
        self.moments = {stage: moment}
        self.tensors.update({key: copy for key, copy in moment.buffers.items() if key in self.tensors})
        return moment.objects

    def add_digests(self, more: Mapping[Group, str]) -> None:
        """Let the digests of the parts be those of ``more``, too."""
        known = self.digests or {}
        self.digests = {group: known.get(group, "") + more.get(group, "") for group in {**known, **more}}

    def let_trainer_go(self) -> None:
        """Record that no update can be applied any more, and drop the old trainer."""
        self.commit = CommitState(self.commit.committed, ready=False, torn=self.commit.torn)
        self.live = None

    @classmethod
    def of(
        cls, live: LiveState, commit: CommitState, checksums: MemoryChecksumManager, fit: int, offset: int
    ) -> HeldState:
        """Hold the state that lives in ``live``.

        Args:
            live: the state.
            commit: the step that the state belongs to.
            checksums: computes the digests of the rank's shard, if it is enabled.
            fit: the fit of the block that the state belongs to.
            offset: how many steps of the job precede that fit.
        """
        moments = {} if commit.torn else dict(live.moments(commit.committed))
        digests = None
        if checksums.enabled and not commit.torn and commit.committed >= 0:
            digests = {group: checksums.digest_all(part) for group, part in split(live, live.shard()).items()}
        buffers = {
            (step, stage): copies
            for step in (commit.committed, commit.committed + 1)
            for stage, copies in live.own_buffers(step).items()
        }
        return cls(
            commit, _without_gradients(live), moments, digests, live if commit.ready else None, fit, offset, buffers
        )

    def redo(self, target: int) -> None:
        """Apply the gradients of ``target`` that the old optimizer still holds, unless that was done before.

        Raises:
            RuntimeError: the gradients are gone.
        """
        if self.commit.committed == target:
            return
        live = self.live
        if live is None:
            raise RuntimeError(f"step {target} is to be applied from gradients that this rank no longer holds")
        # If the update is interrupted, the shard belongs to no step and is refilled; afterwards it is the target's.
        self.commit = CommitState(target - 1, ready=False, torn=True)
        live.apply_held_update()
        self.tensors = _without_gradients(live)
        self.moments = dict(live.moments(target))
        self.digests = None  # they belonged to the step before
        self.commit = CommitState(target, ready=False, torn=False)

    def own_parts(self, live: LiveState, target: int | None, stage: Stage) -> dict[str, str]:
        """Return the digests, by name, of the parts that ranks keep for themselves.

        Args:
            live: the freshly built state, which knows the parts.
            target: the step whose gradients this rank is still to apply; None: the state is that of its step.
            stage: the moment after the step.
        """
        moments = self.live.moments(target) if target is not None and self.live is not None else self.moments
        # A hand-written loop has no moment of a step that is to be redone.
        moment = moments.get(stage)
        parts = live.own_parts(moment.objects) if moment is not None else {}
        return {name: state_tree.digest(part) for name, part in parts.items()}

    def offload(self, memory: HostMemory) -> None:
        """Move the tensors to ``memory``, in which nothing else lies."""
        self.tensors = memory.copies(self.tensors)


def _without_gradients(live: LiveState) -> dict[Key, torch.Tensor]:
    """Return the tensors of ``live``, of which none holds a gradient.

    Between an update and the next ``zero_grad`` the parameters have gradients, which would be held through the
    re-entry; with Megatron's distributed optimizer they are views of its whole gradient buffer.
    """
    return {key: tensor.detach() for key, tensor in live.tensors().items()}
