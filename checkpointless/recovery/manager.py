"""Keeps the live state of a rank over a restart, and gives it back: to the rank itself or to its peers."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.agent.board import Board
from checkpointless.inprocess import ParameterUpdateLock, UnrecoverableError, active_call_wrapper
from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.recovery.checksum import MemoryChecksumManager
from checkpointless.recovery.decide import Decision, RankReport, Verdict, decide
from checkpointless.recovery.exchange import all_gather_json
from checkpointless.recovery.live_state import LiveState
from checkpointless.recovery.rng import RngStates
from checkpointless.recovery.transfer import Key, TensorEntry, TransferReport, receive_state, send_state
from checkpointless.telemetry.events import event_log

logger = logging.getLogger(__name__)


@dataclass
class HeldState:
    """The state that a rank keeps hold of between two generations.

    Attributes:
        live: the old trainer's state; its tensors are references, not copies.
        commit: which step it is of, and whether the next one's update can still be applied.
        objects: the non-tensor state after the committed step.
        offloaded: host copies of the tensors that replaced the references, or None.
    """

    live: LiveState
    commit: CommitState
    objects: dict[str, Any]
    offloaded: dict[Key, torch.Tensor] | None = None

    def tensors(self) -> dict[Key, torch.Tensor]:
        """The held tensors by key."""
        return self.live.tensors() if self.offloaded is None else self.offloaded


class CheckpointManager:
    """Restores training from memory after a fault: keeps the state, decides, fills, verifies.

    A rank whose process lived through the fault keeps references to its model and optimizer (no copy). After the
    block was entered again and everything was rebuilt, all ranks decide together at which step to resume
    (:mod:`checkpointless.recovery.decide`); each takes its own state back or is filled by its replicas. The held
    state is dropped only when the new one is complete.

    Args:
        enable_checksum: compare the replicas of every shard before a recovery. With three or more holders one that
            differs is refilled; with two the recovery is refused.
        enable_offload: keep the held state in (pinned) host memory while everything is rebuilt.
        allow_restart_from_scratch: if neither memory nor storage holds the state, start over at step 0 instead of
            ending the job.

    Attributes:
        global_step: optimizer step of the held state, or None.
        rng_states: this rank's random streams after its newest steps, by step.
        checksum_manager: digests of tensors.
        parameter_update_lock: the lock of the running block.
        refusal: why the last recovery from memory was refused ("" if it was not).
    """

    def __init__(
        self,
        enable_checksum: bool = False,
        enable_offload: bool = False,
        allow_restart_from_scratch: bool = False,
    ) -> None:
        self.enable_offload = enable_offload
        self.allow_restart_from_scratch = allow_restart_from_scratch
        self.checksum_manager = MemoryChecksumManager(enable_checksum)
        self.rng_states: dict[int, RngStates] = {}
        self.refusal = ""
        self._fallback_lock = ParameterUpdateLock()
        self._held: HeldState | None = None
        self._attached: LiveState | None = None
        self._rng_to_restore: RngStates | None = None
        self._restored: dict[str, Any] | None = None

    @property
    def parameter_update_lock(self) -> ParameterUpdateLock:
        """The lock around this rank's optimizer update."""
        call = active_call_wrapper()
        return call.parameter_update_lock if call is not None else self._fallback_lock

    @property
    def global_step(self) -> int | None:
        """Optimizer step of the held state, or None if none is held."""
        return self._held.commit.committed if self._held is not None else None

    @property
    def enable_checksum(self) -> bool:
        """Whether replicas are compared before a recovery."""
        return self.checksum_manager.enabled

    @enable_checksum.setter
    def enable_checksum(self, enabled: bool) -> None:
        self.checksum_manager.enabled = enabled

    # --- while training -------------------------------------------------------------------------------------

    def attach(self, live: LiveState, step: int) -> None:
        """The rank's state is whole, is that after ``step``, and lives in ``live`` from now on.

        What was held before is dropped here and not earlier: until the trainer has loaded everything, a further
        fault goes back to it.
        """
        self._attached = live
        self._held = None
        self.parameter_update_lock.set_committed(step)
        call = active_call_wrapper()
        if call is not None:
            call.committed(step)

    def store_rng_states(
        self, step: int | None = None, loss: float | None = None, at_batch_start: bool = False
    ) -> None:
        """Keep this rank's random streams as those after ``step``, here and on its board.

        Args:
            step: default: the committed step.
            loss: the loss of that step, kept with them.
            at_batch_start: see :class:`~checkpointless.recovery.rng.RngStates`.
        """
        step = self.parameter_update_lock.committed if step is None else step
        if loss is None and step in self.rng_states:
            loss = self.rng_states[step].loss
        states = RngStates.capture(loss, at_batch_start)
        before = {step - 1: self.rng_states[step - 1]} if step - 1 in self.rng_states else {}
        self.rng_states = {**before, step: states}  # one assignment: an interruption leaves the old or the new
        board = _board()
        if board is not None:
            board.put_snapshot(step, states.to_bytes(), series=int(at_batch_start))

    def load_rng_states(self, step: int | None = None) -> bool:
        """Put the streams after ``step`` back (default: the step that was resumed at).

        Returns:
            False if this rank has none for that step.
        """
        step = self.parameter_update_lock.committed if step is None else step
        states = self.rng_of(step)
        if states is not None:
            states.restore()
        return states is not None

    def rng_of(self, step: int) -> RngStates | None:
        """This rank's streams after ``step``: from memory, or from the board if the process is new."""
        if step in self.rng_states:
            return self.rng_states[step]
        board = _board()
        snapshot = board.snapshot(step) if board is not None else None
        return RngStates.from_bytes(snapshot) if snapshot is not None else None

    # --- when a fault comes -----------------------------------------------------------------------------------

    def save_checkpoint(self, trainer: Any) -> None:
        """Keep hold of the state of ``trainer`` as it is now: references, not copies.

        Args:
            trainer: a trainer whose strategy has ``live_state()``.
        """
        self._hold(trainer.strategy.live_state())

    def hold(self) -> None:
        """The block was left because of a fault. Keep the state of the generation that is over.

        If that generation had not got its state back yet, what was held before stays.
        """
        attached, self._attached = self._attached, None
        if attached is not None:
            self._hold(attached)
        self.parameter_update_lock.forget()

    def _hold(self, live: LiveState) -> None:
        commit = self.parameter_update_lock.state()
        if commit.torn:
            objects = {}
        elif live.has_begun() or self._restored is None:
            objects = live.objects(commit.committed)
        else:
            objects = self._restored  # no step has begun since they were loaded
        self._held = HeldState(live, commit, objects)
        self.maybe_offload_checkpoint()

    def maybe_offload_checkpoint(self) -> None:
        """Move the held tensors to host memory (pinned where CUDA is), if ``enable_offload`` asks for it.

        Not while an update can still be applied to them: that needs the optimizer.
        """
        held = self._held
        if not self.enable_offload or held is None or held.offloaded is not None or held.commit.ready:
            return
        pin = torch.cuda.is_initialized()
        held.offloaded = {
            key: torch.empty_like(tensor, device="cpu", pin_memory=pin).copy_(tensor)
            for key, tensor in held.live.tensors().items()
        }

    def delete_checkpoint(self) -> None:
        """Drop the held state."""
        self._held = None

    # --- when the block has been entered again ------------------------------------------------------------------

    def try_checkpointless_load(self, trainer: Any) -> dict[str, Any] | None:
        """Recover ``trainer`` from memory. Collective: every rank of the job calls it.

        Args:
            trainer: freshly built, its strategy set up.

        Returns:
            The non-tensor state for the trainer to load, its tensors being in place; None if there is nothing to
            recover (first start) or if it is refused (:attr:`refusal` says why).
        """
        self.refusal = ""
        self._rng_to_restore = None
        self._restored = None
        live: LiveState = trainer.strategy.live_state()
        decision = self._decide(live)
        if decision.verdict is Verdict.START:
            return None
        if decision.verdict is Verdict.REFUSE or decision.target is None:
            self.refusal = decision.reason
            logger.error("recovery from memory is not possible: %s", decision.reason)
            return None
        objects = self._restore(live, decision, decision.target)
        self._restored = objects
        self._set_rng_to_restore(decision.target)
        return objects

    def checkpointless_recovery_feasible(self, trainer: Any, include_checksum_verification: bool = True) -> bool:
        """Whether the job could resume from memory now. Collective.

        Args:
            trainer: freshly built, its strategy set up.
            include_checksum_verification: compare digests too, where they are enabled.
        """
        enabled = self.checksum_manager.enabled
        self.checksum_manager.enabled = enabled and include_checksum_verification
        try:
            return self._decide(trainer.strategy.live_state()).verdict is Verdict.RESUME
        finally:
            self.checksum_manager.enabled = enabled

    def restore_rng_at(self, batch_start: bool) -> None:
        """Put this rank's streams back at the moment of the resumed loop at which they were taken.

        Args:
            batch_start: True just before the first training step, False when the loop starts.
        """
        states = self._rng_to_restore
        if states is not None and states.at_batch_start == batch_start:
            states.restore()
            self._rng_to_restore = None

    def _decide(self, live: LiveState) -> Decision:
        call = active_call_wrapper()
        high_water = call.high_water if call is not None else -1
        with _span("decide") as fields:
            reports = [
                RankReport(**{**each, "group": tuple(each["group"])})
                for each in all_gather_json(asdict(self._report(live)))
            ]
            decision = decide(reports, high_water)
            fields.update(
                verdict=decision.verdict.value,
                target=decision.target,
                redo=list(decision.redo),
                refills={str(rank): list(sources) for rank, sources in decision.refills.items()},
                reason=decision.reason,
            )
        return decision

    def _report(self, live: LiveState) -> RankReport:
        held = self._held
        if held is None or held.commit.committed < 0:
            return RankReport(dist.get_rank(), None, False, False, live.group())
        commit = held.commit
        digest = None
        if self.checksum_manager.enabled and not commit.torn:
            digest = self.checksum_manager.digest_all(held.live.shard())
        return RankReport(dist.get_rank(), commit.committed, commit.ready, commit.torn, live.group(), digest)

    def _restore(self, live: LiveState, decision: Decision, target: int) -> dict[str, Any]:
        rank = dist.get_rank()
        held = self._held
        if rank in decision.redo and held is not None:
            # Interrupted in the middle, the shard is of no step and is refilled; afterwards it is the target's.
            held.commit = CommitState(target - 1, ready=False, torn=True)
            held.live.apply_held_update()
            held.objects = held.live.objects(target)
            held.commit = CommitState(target, ready=False, torn=False)
        sources = decision.refills.get(rank)
        with _span("transfer", refills=len(decision.refills)) as fields:
            if sources:
                objects, report = receive_state(sources, live.room)
                fields.update(asdict(report), bytes=report.nbytes)
            else:
                if held is None:
                    raise RuntimeError(f"rank {rank} was decided to be healthy but holds no state")
                tensors, objects = held.tensors(), held.objects
                self._serve(tensors, objects, decision, rank)
                report = self._take_back(live, tensors)
                fields.update(asdict(report), bytes=report.nbytes)
        with _span("verify", refilled=bool(sources)):
            live.load_objects(objects)
            live.settle()
        return objects

    @staticmethod
    def _serve(tensors: dict[Key, torch.Tensor], objects: Any, decision: Decision, rank: int) -> None:
        """Fill every rank of which this one is a source, in the order that all sources keep."""
        for destination in sorted(decision.refills):
            sources: Sequence[int] = decision.refills[destination]
            if rank in sources:
                send_state(tensors, objects, destination, place=sources.index(rank), places=len(sources))

    @staticmethod
    def _take_back(live: LiveState, tensors: dict[Key, torch.Tensor]) -> TransferReport:
        """Put this rank's own held tensors into its new storage."""
        entries = [
            TensorEntry(key, tensor.dtype, tuple(tensor.shape), tensor.device.type, 0)
            for key, tensor in tensors.items()
        ]
        room = live.room(entries)
        with torch.no_grad():
            for key, tensor in tensors.items():
                room[key].copy_(tensor)
        return TransferReport(sum(entry.nbytes for entry in entries), (), 0.0, 0)

    def _set_rng_to_restore(self, target: int) -> None:
        """Have this rank's own streams put back when the loop resumes.

        Raises:
            UnrecoverableError: steps were made and this rank's streams are nowhere: it would train on with others.
        """
        self._rng_to_restore = self.rng_of(target)
        if self._rng_to_restore is None and target > 0:
            raise UnrecoverableError(
                f"rank {dist.get_rank()} has no random streams of its own for step {target}: "
                "its process is new and its board does not hold them"
            )


def _board() -> Board | None:
    call = active_call_wrapper()
    return call.board if call is not None else None


def _span(stage: str, **fields: Any) -> Any:
    call = active_call_wrapper()
    generation = call.generation if call is not None else int(os.environ.get("JOB_RESTART_COUNT", "0"))
    return event_log().span(stage, generation=generation, incident=call.incident if call else None, **fields)
