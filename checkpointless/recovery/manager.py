"""Keeps the live state of a rank across a restart, and gives it back to the rank itself or to its peers."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.inprocess import HPCallWrapper, ParameterUpdateLock, active_call_wrapper
from checkpointless.inprocess.context import aside, own_board, span
from checkpointless.inprocess.memory import peak_growth
from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.recovery.decide import Decision, RankReport, Verdict, decide
from checkpointless.recovery.live_state import LiveState
from checkpointless.recovery.moment import Moment, Stage
from checkpointless.recovery.own_buffers import NOTHING, OwnBuffers, decode
from checkpointless.recovery.rng import DATA_SERIES, RngStates, from_board, put_on_board
from checkpointless.recovery.rng_replicas import OwnState, RngReplicas
from checkpointless.serialization import state_tree
from checkpointless.serialization.checksum import MemoryChecksumManager
from checkpointless.serialization.tensor_memory import flip_a_bit
from checkpointless.transfer.exchange import all_gather_json, receive_bytes, send_bytes
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import MEMORY_BUDGET_BYTES, Fill, TransferReport, receive_state, send_state

logger = logging.getLogger(__name__)

DATA = "the state of the training data"  # prefix of the names of parts that must not come from a peer


@dataclass
class HeldState:
    """The state that a rank holds between two generations.

    Attributes:
        commit: the step that the state belongs to, and whether the update of the next step can still be applied.
        tensors: references to the old model's and optimizer's tensors, not copies. Each is replaced by its
            successor as soon as that is filled, so that at every moment this is the whole state, and little of it
            exists twice.
        moments: the rest of the state, at every moment after the committed step that can be resumed at.
        digest: the digest of the rank's shard, if replicas are to be compared.
        live: the old trainer's state, while its update can still be applied; else nothing holds the old trainer.
        fit: the fit of the block that the state belongs to.
        offset: how many steps of the job precede that fit.
        buffers: the rank's own buffers, at every moment after the committed step and after the step that follows
            it. They are whole even if an update failed half-way.
    """

    commit: CommitState
    tensors: dict[Key, torch.Tensor]
    moments: Mapping[Stage, Moment]
    digest: str | None = None
    live: LiveState | None = None
    fit: int = 1
    offset: int = 0
    buffers: Mapping[tuple[int, Stage], Mapping[Key, torch.Tensor]] = field(default_factory=dict)

    def go_back_to(self, stage: Stage) -> dict[str, Any]:
        """Hold the state as it was at ``stage``, and drop all other moments.

        Returns:
            The non-tensor state of that moment.
        """
        moment = self.moments[stage]
        self.moments = {stage: moment}
        self.tensors.update({key: copy for key, copy in moment.buffers.items() if key in self.tensors})
        return moment.objects

    def let_trainer_go(self) -> None:
        """Record that no update can be applied any more, and drop the old trainer."""
        self.commit = CommitState(self.commit.committed, ready=False, torn=self.commit.torn)
        self.live = None


class CheckpointManager:
    """Restores training from memory after a fault: keeps the state, decides, fills, verifies.

    A rank whose process lived through the fault keeps references to its model and optimizer (no copy). After the
    block was entered again and everything was rebuilt, all ranks decide together at which step to resume
    (:mod:`checkpointless.recovery.decide`). Each rank takes its own state back or is filled by its replicas. The
    held state is dropped only when the new state is complete.

    Args:
        enable_checksum: compare the replicas of every shard before a recovery. With three or more holders, one that
            differs is refilled; with two, the recovery is refused.
        enable_offload: keep the held state in pinned host memory while everything is rebuilt. (Nothing is moved if
            the state lies in host memory already, nor while an update can still be applied to it.)
        allow_restart_from_scratch: if neither memory nor storage holds the state, start over at step 0 instead of
            ending the job.
        memory_budget_bytes: how many bytes the buffers of a transfer may take on each rank that takes part.
        rng_replication_jump: how many ranks further on a copy of a rank's random streams is kept, in case its node
            is lost. None: on the next node, if there is more than one. 0: no copy is kept.

    Raises:
        ValueError: ``memory_budget_bytes`` is not positive, or ``rng_replication_jump`` is negative.

    Attributes:
        global_step: the optimizer step of the held state, or None.
        rng_states: this rank's random streams at the moments after its newest two steps; None: it has none.
        resumed_at: the step and the stage that the last recovery resumed at; None if there was none.
        verdict: the verdict of the last recovery; None if there was none.
        was_filled: whether the last recovery gave this rank a peer's state.
        fit: the fit of the running block that is under way, counted from 1 (0: none has begun).
        offset: how many steps of the job precede that fit: steps are counted over all fits of a block.
        finished: by fit, the non-tensor state in which the fit ended.
        saves: what a strategy knows about the checkpoints of its newest step.
        checksum_manager: computes the digests of tensors.
        parameter_update_lock: the lock of the running block.
        refusal: why the last recovery from memory was refused ("" if it was not).
        bytes_received: how many bytes of tensors were sent to this rank in the last recovery.
    """

    def __init__(
        self,
        enable_checksum: bool = False,
        enable_offload: bool = False,
        allow_restart_from_scratch: bool = False,
        memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
        rng_replication_jump: int | None = None,
    ) -> None:
        if memory_budget_bytes < 1:
            raise ValueError(f"memory_budget_bytes must be positive, not {memory_budget_bytes}")
        self.memory_budget_bytes = memory_budget_bytes
        self.enable_offload = enable_offload
        self.allow_restart_from_scratch = allow_restart_from_scratch
        self.checksum_manager = MemoryChecksumManager(enable_checksum)
        self.rng_states: dict[tuple[int, Stage], RngStates] | None = {}
        self._data_start: RngStates | None = None
        self._rng_replicas = RngReplicas(rng_replication_jump)
        self._buffers = OwnBuffers()
        self.refusal = ""
        self.bytes_received = 0
        self._fallback_lock = ParameterUpdateLock()
        self._held: HeldState | None = None
        self._attached: LiveState | None = None
        self._arrived: Mapping[Key, torch.Tensor] = {}  # what an interrupted transfer had filled
        self.resumed_at: tuple[int, Stage] | None = None
        self.verdict: Verdict | None = None
        self.was_filled = False
        self.fit = 0
        self.offset = 0
        self.finished: dict[int, dict[str, Any]] = {}
        self.saves: Any = None
        self._begun = 0
        self._attached_fit = 1, 0  # the fit's number, and the steps of the job before it

    @property
    def parameter_update_lock(self) -> ParameterUpdateLock:
        """The lock around this rank's optimizer update."""
        call = active_call_wrapper()
        return call.parameter_update_lock if call is not None else self._fallback_lock

    @property
    def global_step(self) -> int | None:
        """The optimizer step of the held state, or None if none is held."""
        return self._held.commit.committed if self._held is not None else None

    @property
    def enable_checksum(self) -> bool:
        """Whether replicas are compared before a recovery."""
        return self.checksum_manager.enabled

    @enable_checksum.setter
    def enable_checksum(self, enabled: bool) -> None:
        self.checksum_manager.enabled = enabled

    # --- while training -------------------------------------------------------------------------------------

    def begin_fit(self) -> None:
        """Begin a fit of the block. Its steps are counted on from those of the fits before it."""
        self.fit += 1
        self.offset = self.parameter_update_lock.committed + 1 if self.fit > 1 else 0

    def finish_fit(self, objects: dict[str, Any]) -> None:
        """Record that the fit under way is over, on all ranks.

        Args:
            objects: the non-tensor state in which the fit ended, for a block that is entered again later.
        """
        self.finished = {**self.finished, self.fit: objects}

    def finished_fit(self) -> dict[str, Any] | None:
        """Return the non-tensor state in which the fit under way ended before the fault. Collective.

        Returns:
            The state, from this rank's memory or a peer's; None if no rank has it.
        """
        mine = self.finished.get(self.fit)
        have = all_gather_json(mine is not None)
        if not any(have):
            return None
        giver = have.index(True)
        if dist.get_rank() == giver:
            payload = state_tree.dumps(mine)
            for rank, has in enumerate(have):
                if not has:
                    send_bytes(payload, rank)
        elif mine is None:
            mine = state_tree.loads(receive_bytes(giver))
            self.finished = {**self.finished, self.fit: mine}
        return mine

    def attach(self, live: LiveState, step: int) -> None:
        """Record that the rank's state is whole, is the state after ``step``, and lives in ``live`` from now on.

        The held state is dropped here and not earlier: until the trainer has loaded everything, a further fault
        goes back to it.
        """
        self._attached = live
        self._attached_fit = max(self.fit, 1), self.offset
        self._held = None
        self._begun = self.fit
        self.parameter_update_lock.set_committed(step)
        call = active_call_wrapper()
        if call is not None:
            call.committed(step)

    def store_rng_states(
        self,
        step: int | None = None,
        loss: float | None = None,
        stage: Stage = Stage.COMMITTED,
        own: Mapping[str, Any] | None = MappingProxyType({}),
    ) -> None:
        """Keep this rank's random streams as those after ``step``, here and on its board.

        Args:
            step: the optimizer step; default: the committed step.
            loss: the loss of that step, which is kept with the streams.
            stage: the moment after the step.
            own: what else this rank alone has at that moment, as plain data that nobody changes; it is kept with
                the streams. None: it is too large to be kept.
        """
        step = self.parameter_update_lock.committed if step is None else step
        known = self._streams_of(step)
        if loss is None and known:
            loss = next(iter(known.values())).loss
        self._keep_rng_states(step, RngStates.capture(loss, stage, own))

    def own_of(self, step: int, stage: Stage) -> Mapping[str, Any] | None:
        """Return what :meth:`store_rng_states` kept as ``own`` at ``stage`` after ``step``; None: it is lost."""
        states = self._streams_of(step).get(stage)
        return states.own if states is not None else None

    def _keep_rng_states(self, step: int, states: RngStates) -> None:
        kept = {key: each for key, each in (self.rng_states or {}).items() if key[0] >= step - 1}
        if states.stage is Stage.COMMITTED:  # what followed when this step was made before is void
            kept = {key: each for key, each in kept.items() if key[0] != step}
        board = own_board()
        if states.stage is not Stage.COMMITTED and board is not None and all(key[0] != step for key in kept):
            kept.update({(step, stage): each for stage, each in from_board(board, step).items()})  # a new process
        after_the_step = kept.get((step, Stage.COMMITTED))
        kept[step, states.stage] = states
        self.rng_states = kept  # one assignment: an interruption leaves the old or the new
        if board is not None:
            put_on_board(board, step, states, after_the_step)

    def begin_buffers(self, live: LiveState) -> None:
        """Begin a training with the state of ``live``: find out which buffers are a rank's own. Collective."""
        self._buffers.begin(live.copy_buffers(), live.group())

    def keep_buffers(self, step: int, stage: Stage, buffers: Mapping[Key, torch.Tensor]) -> None:
        """Keep this rank's buffers as those after ``step``, here and on its board, if they may be its own.

        Call this before :meth:`store_rng_states`, so that a rank that has the streams of a moment has its buffers.

        Args:
            step: the optimizer step.
            stage: the moment after the step.
            buffers: copies of the buffers, which nobody changes.
        """
        self._buffers.keep(step, stage, buffers, own_board())

    def keep_data_start(self, streams: RngStates) -> None:
        """Keep ``streams``, from which a new iterator over the training data draws its order, also on the board."""
        self._data_start = streams
        board = own_board()
        if board is not None:
            board.put_snapshot(0, streams.to_bytes(), series=DATA_SERIES)

    def data_start(self) -> RngStates | None:
        """Return this rank's streams as they were when the newest iterator over the training data began."""
        board = own_board()
        if self._data_start is None and board is not None:
            kept = board.snapshot(0, series=DATA_SERIES)
            self._data_start = RngStates.from_bytes(kept) if kept else None
        return self._data_start

    def replicate_rng_states(self, step: int) -> None:
        """Have what is this rank's own after ``step`` kept on another node, too, if there is one. Collective.

        This includes its random streams, the streams that the order of its data is drawn from, and its buffers.

        Args:
            step: the optimizer step, whose streams and buffers have been stored.
        """
        if self._attached is not None:
            self._buffers.compare(step, self._attached.group)
        self._rng_replicas.exchange(step, lambda: self._own_state(step, self._streams_of(step)[Stage.COMMITTED]))

    def _own_state(self, step: int, states: RngStates) -> bytes:
        """Return what is this rank's own at the moment of ``states``, for another node to keep."""
        record = self._buffers.record(step, states.stage, own_board())
        start = self.data_start()
        return OwnState(states.to_bytes(), start.to_bytes() if start is not None else None, record).to_bytes()

    def load_rng_states(self, step: int | None = None) -> bool:
        """Put back the newest streams after ``step`` (default: the step that was resumed at).

        Returns:
            False if this rank has no streams for that step.
        """
        step = self.parameter_update_lock.committed if step is None else step
        states = self.rng_of(step)
        if states is not None:
            states.restore()
        return states is not None

    def rng_of(self, step: int) -> RngStates | None:
        """Return this rank's newest streams after ``step``, from memory or, in a new process, from the board."""
        known = self._streams_of(step)
        return known[max(known)] if known else None

    def _streams_of(self, step: int) -> dict[Stage, RngStates]:
        known = {key[1]: states for key, states in (self.rng_states or {}).items() if key[0] == step}
        board = own_board()
        return known if known or board is None else from_board(board, step)

    # --- when a fault comes -----------------------------------------------------------------------------------

    def save_checkpoint(self, trainer: Any) -> None:
        """Hold the state of ``trainer`` as it is now, as references and not copies.

        Args:
            trainer: a trainer whose strategy has ``live_state()``.
        """
        self._hold(trainer.strategy.live_state())

    def hold(self) -> None:
        """Hold the state of the generation that is over, after the block was left because of a fault.

        If that generation had not got its state back yet, what was held before stays. The state of a trainer is
        held through :meth:`save_checkpoint`.
        """
        attached, self._attached = self._attached, None
        trainer = getattr(attached, "trainer", None)
        if trainer is not None and trainer.strategy.live_state() is attached:  # not of a fit that has not begun
            self.save_checkpoint(trainer)
        elif attached is not None:
            self._hold(attached)
        self.parameter_update_lock.forget()
        self.fit = self.offset = 0

    def _hold(self, live: LiveState) -> None:
        commit = self.parameter_update_lock.state()
        moments = {} if commit.torn else dict(live.moments(commit.committed))
        digest = None
        if self.checksum_manager.enabled and not commit.torn and commit.committed >= 0:
            digest = self.checksum_manager.digest_all(live.shard())
        buffers = {
            (step, stage): copies
            for step in (commit.committed, commit.committed + 1)
            for stage, copies in live.own_buffers(step).items()
        }
        self._held = HeldState(
            commit, live.tensors(), moments, digest, live if commit.ready else None, *self._attached_fit, buffers
        )
        self.maybe_offload_checkpoint()

    def maybe_offload_checkpoint(self) -> None:
        """Move the held tensors to pinned host memory, if ``enable_offload`` is set.

        They stay in place while an update can still be applied to them, because the update needs the optimizer.
        """
        held = self._held
        if not self.enable_offload or held is None or held.live is not None:
            return
        for key, tensor in held.tensors.items():
            if tensor.device.type != "cpu":
                host = torch.empty_like(tensor, device="cpu", pin_memory=True)
                held.tensors[key] = host.copy_(tensor, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def delete_checkpoint(self) -> None:
        """Drop the held state and the random streams, and free their memory.

        The engine calls this method when the state came from storage. After a recovery from memory it drops what
        it held, and leaves garbage collection to the end of the first step.
        """
        self._held = None
        self._arrived = {}
        self.rng_states = {}
        self._data_start = None
        self._buffers.forget()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    # --- when the block has been entered again ------------------------------------------------------------------

    def try_checkpointless_load(self, trainer: Any) -> dict[str, Any] | None:
        """Recover ``trainer`` from memory. Collective: every rank of the job calls it.

        Args:
            trainer: a freshly built trainer whose strategy is set up.

        Returns:
            The checkpoint for Lightning to load, with its tensors in place; None if there is nothing to recover or
            if recovery is refused (see :meth:`recover`).
        """
        objects = self.recover(trainer.strategy.live_state())
        if objects is None or "checkpoint" not in objects:
            return objects
        trainer.strategy.restored_from_memory(objects)
        checkpoint: dict[str, Any] = objects["checkpoint"]
        return checkpoint

    def recover(self, live: LiveState) -> dict[str, Any] | None:
        """Recover ``live`` from memory. Collective: every rank of the job calls it.

        Args:
            live: the state of a freshly built training.

        Returns:
            The non-tensor state to load, with the tensors in place; None if there is nothing to recover
            (:attr:`verdict`: a first start, or a fit that was over) or if recovery is refused (:attr:`refusal` says
            why).
        """
        self.refusal = ""
        self.resumed_at = None
        decision = self._decide(live)
        self.verdict = decision.verdict
        if decision.verdict in (Verdict.START, Verdict.SKIP):
            return None
        self.offset = decision.offset
        if decision.verdict is Verdict.REFUSE or decision.target is None:
            self._refuse(decision.reason)
            return None
        lost = self._find_rng(decision.target, Stage(decision.stage))
        if lost:
            self._refuse(
                f"the random streams of rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} after step "
                f"{decision.target} are lost: neither a process, nor a board, nor another node has them"
            )
            return None
        lost_parts = self._find_lost_parts(live, decision, decision.target)
        if lost_parts:
            self._refuse(
                f"{', '.join(lost_parts)} differed from rank to rank, and that of rank "
                f"{', '.join(map(str, sorted(decision.refills)))} was lost with its process"
            )
            return None
        lost_buffers = self._find_lost_buffers(decision, decision.target)
        if lost_buffers:
            rank, reason = min(lost_buffers.items())
            self._refuse(f"the process of rank {rank} was lost, and {reason}")
            return None
        objects = self._restore(live, decision, decision.target)
        self.resumed_at = decision.target, Stage(decision.stage)
        return objects

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        logger.error("recovery from memory is not possible: %s", reason)

    def checkpointless_recovery_feasible(self, trainer: Any, include_checksum_verification: bool = True) -> bool:
        """Return whether the job could resume from memory now. Collective.

        Args:
            trainer: a freshly built trainer whose strategy is set up.
            include_checksum_verification: also compare digests, if they are enabled.
        """
        decision = self._decide(trainer.strategy.live_state(), include_checksum_verification)
        if decision.verdict is not Verdict.RESUME or decision.target is None:
            return False
        return not self._find_rng(decision.target, Stage(decision.stage))

    def restore_streams(self, stage: Stage | None = None) -> None:
        """Put back the random streams that this rank had after the step that was resumed at.

        Args:
            stage: the moment after that step; default: the moment that was resumed at.

        Raises:
            RuntimeError: the streams are not known, and it is not the start of a fit.
        """
        if self.resumed_at is None:
            return
        step, resumed = self.resumed_at
        stage = resumed if stage is None else stage
        if not self.restore_streams_of(step, stage) and step > self.offset and stage is not Stage.LOADED:
            raise RuntimeError(f"the random streams of this rank after step {step} ({stage.name}) are not known")

    def restore_streams_of(self, step: int, stage: Stage) -> bool:
        """Put back the random streams that this rank had at ``stage`` after ``step``.

        Returns:
            False if the streams are not known.
        """
        states = self._streams_of(step).get(stage)
        if states is not None:
            states.restore()
        return states is not None

    def _decide(self, live: LiveState, compare_digests: bool = True) -> Decision:
        self.bytes_received = 0
        call = active_call_wrapper()
        high_water = call.high_water if call is not None else -1
        with span("decide") as fields:
            mine = asdict(self._report(live, compare_digests))
            answers = all_gather_json({"report": mine, "keeps": self._kept_streams()})
            jump = self._rng_replicas.jump
            reports = []
            for rank, answer in enumerate(answers):
                each = answer["report"]
                streams = each["streams"] or (answers[(rank + jump) % len(answers)]["keeps"] if jump else [])
                plain = {"group": tuple(each["group"]), "stages": tuple(each["stages"])}
                rows = {"streams": tuple(map(tuple, streams)), "saves": tuple(map(tuple, each["saves"]))}
                reports.append(RankReport(**{**each, **plain, **rows}))
            decision = decide(reports, high_water, max(self.fit, 1))
            fields.update(
                verdict=decision.verdict.value,
                target=decision.target,
                redo=list(decision.redo),
                refills={str(rank): list(sources) for rank, sources in decision.refills.items()},
                reason=decision.reason,
            )
        return decision

    def _report(self, live: LiveState, with_digest: bool) -> RankReport:
        held = self._held
        streams = self._known_streams()
        if held is None or held.commit.committed < 0 or not (held.moments or held.commit.torn):
            return RankReport(dist.get_rank(), None, False, False, live.group(), streams=streams, begun=self._begun)
        commit = held.commit
        return RankReport(
            dist.get_rank(),
            commit.committed,
            commit.ready,
            commit.torn,
            live.group(),
            held.digest if with_digest else None,
            tuple(int(stage) for stage in sorted(held.moments)),
            streams,
            held.fit,
            held.offset,
            self._begun,
            self.saves.unfinished if self.saves is not None else (),
        )

    def _known_streams(self) -> tuple[tuple[int, int], ...]:
        """Return the newest steps and moments for which this rank has its streams."""
        board = own_board()
        steps = {step for step, _ in self.rng_states or {}}
        if not steps and board is not None:
            committed = board.read().committed
            steps = {committed - 1, committed, committed + 1}
        known = {step: self._streams_of(step) for step in sorted(steps) if step >= 0}
        return tuple((step, int(stage)) for step, streams in known.items() for stage in sorted(streams))

    def _kept_streams(self) -> list[list[int]]:
        """Return the newest steps and moments for which this rank keeps another rank's streams."""
        kept = self._rng_replicas.kept()
        return [
            [step, int(RngStates.from_bytes(OwnState.from_bytes(payload).streams).stage)]
            for step, payload in kept.items()
        ]

    def _restore(self, live: LiveState, decision: Decision, target: int) -> dict[str, Any]:
        rank = dist.get_rank()
        stage = Stage(decision.stage)
        held = self._held
        own: dict[str, Any] = {}
        sources = decision.refills.get(rank)
        self.was_filled = bool(sources)
        if held is not None:
            if rank in decision.redo:
                self._redo(held, target)
            held.let_trainer_go()
            if not sources:
                own = held.go_back_to(stage)
        with span("transfer", refills=len(decision.refills)) as fields:
            if sources:
                objects, report = self._fill(live, sources)
                self._put_own_buffers(live, (target, stage))
            elif held is not None:
                objects = own
                self._serve(held, own, decision, rank, target)
                report = self._take_back(live, held)
            else:
                raise RuntimeError(f"rank {rank} was decided to be healthy but holds no state")
            self.bytes_received += report.bytes
            fields.update(asdict(report))
        with span("verify", refilled=bool(sources)) as fields:
            live.load_objects(objects)
            live.settle()
            live.resumed(target, stage, objects)
            fields.update(peak_growth())
        return objects

    @staticmethod
    def _redo(held: HeldState, target: int) -> None:
        """Apply the gradients of ``target`` that the old optimizer still holds, unless that was done before."""
        if held.commit.committed == target:
            return
        live = held.live
        if live is None:
            raise RuntimeError(f"step {target} is to be applied from gradients that this rank holds no longer")
        # If the update is interrupted, the shard belongs to no step and is refilled; afterwards it is the target's.
        held.commit = CommitState(target - 1, ready=False, torn=True)
        live.apply_held_update()
        held.tensors = live.tensors()
        held.moments = dict(live.moments(target))
        held.digest = None  # it belonged to the step before
        held.commit = CommitState(target, ready=False, torn=False)

    def _fill(self, live: LiveState, sources: Sequence[int]) -> tuple[Any, TransferReport]:
        """Receive the state from ``sources``; keep what an interrupted transfer brought or this rank still had."""
        known = {**(self._held.tensors if self._held is not None else {}), **self._arrived}

        def room(entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
            self._arrived = live.room(entries)
            return self._arrived

        filled = aside(
            lambda: receive_state(sources, room, known=known, memory_budget_bytes=self.memory_budget_bytes)
        )
        self._arrived = {}
        return filled

    @staticmethod
    def _serve(held: HeldState, objects: dict[str, Any], decision: Decision, rank: int, target: int) -> None:
        """Fill every rank that has this rank as a source."""
        fills = [
            Fill(destination, sources.index(rank), len(sources))
            for destination, sources in sorted(decision.refills.items())
            if rank in sources
        ]
        if not fills:
            return

        def on_bucket(position: int, count: int, payload: torch.Tensor) -> torch.Tensor:
            call = active_call_wrapper()
            if call is None or position != count // 2:
                return payload
            damaged: list[torch.Tensor] = []

            def damage() -> None:
                damaged.append(payload.clone())
                flip_a_bit(damaged[0])

            call.enter_phase("transfer", target, damage)
            return damaged[0] if damaged else payload

        aside(lambda: send_state(held.tensors, objects, fills, on_bucket=on_bucket))

    @staticmethod
    def _take_back(live: LiveState, held: HeldState) -> TransferReport:
        """Put this rank's held tensors in their new place: without a copy where that is possible, else copied."""
        began_s = time.monotonic()
        adopted = live.adopt(held.tensors)
        copied = [key for key in held.tensors if key not in adopted]
        room = live.room([TensorEntry.of(key, held.tensors[key]) for key in copied])
        with torch.no_grad():
            for key in copied:
                room[key].copy_(held.tensors[key])
                held.tensors[key] = room[key]
        kept = sum(tensor.numel() * tensor.dtype.itemsize for tensor in held.tensors.values())
        return TransferReport(kept=kept, seconds=time.monotonic() - began_s)

    def _find_lost_parts(self, live: LiveState, decision: Decision, target: int) -> list[str]:
        """Compare the parts of the state that ranks keep for themselves, if a rank has lost its parts. Collective.

        A peer's part can replace a lost one only if the parts of all ranks are equal. Parts that do not belong to
        the training data are taken from a peer nevertheless, and a warning says so: a callback may keep times of
        day.

        Returns:
            The names of the lost parts of the training data.
        """
        if not decision.refills:
            return []
        held = self._held
        mine: dict[str, str] | None = None
        if held is not None and dist.get_rank() not in decision.refills:
            again = dist.get_rank() in decision.redo and held.live is not None
            moments = held.live.moments(target) if again and held.live is not None else held.moments
            # A hand-written loop has no moment of a step that is to be redone.
            moment = moments.get(Stage(decision.stage))
            parts = live.own_parts(moment.objects) if moment is not None else {}
            mine = {name: state_tree.digest(part) for name, part in parts.items()}
        known = [each for each in all_gather_json(mine) if each is not None]
        names = sorted({name for each in known for name in each})
        differ = [name for name in names if len({each.get(name) for each in known}) > 1]
        lost = [name for name in differ if name.startswith(DATA)]
        for name in sorted(set(differ) - set(lost)):
            logger.warning("%s differs from rank to rank: rank %s gets a peer's", name, sorted(decision.refills))
        return lost

    def _find_lost_buffers(self, decision: Decision, target: int) -> dict[int, str]:
        """Return the ranks that cannot be given their own buffers, and why. Collective."""
        if not decision.refills:
            return {}
        moment = target, Stage(decision.stage)
        held = self._held.buffers.get(moment) if self._held is not None else None
        record = self._buffers.record(*moment, own_board())
        is_filled = dist.get_rank() in decision.refills
        theirs = None if is_filled else held
        return self._buffers.lost(theirs, record, decision.refills, is_filled and held is not None)

    def _put_own_buffers(self, live: LiveState, moment: tuple[int, Stage]) -> None:
        """Put back this rank's own buffers, where they were kept, after a peer has filled the rank."""
        held = self._held
        own = held.buffers.get(moment) if held is not None else None
        if own is None:
            record = self._buffers.record(*moment, own_board()) or NOTHING
            own = decode(record)
            if record == NOTHING:
                self._buffers.begun_with(live.copy_buffers())
        places = live.room([TensorEntry.of(key, buffer) for key, buffer in own.items()])
        with torch.no_grad():
            for key, buffer in own.items():
                places[key].copy_(buffer)

    def _find_rng(self, target: int, stage: Stage) -> list[int]:
        """Give every rank its own random streams after ``target``, for when the loop resumes. Collective.

        Returns:
            The ranks whose streams are nowhere: they would train on with different streams. No rank at step 0,
            where the streams begin.
        """
        if target == 0:
            return []
        known = self._streams_of(target)
        given, lost = self._rng_replicas.find(target, bool(known))
        if given is not None:
            kept = OwnState.from_bytes(given)
            states = RngStates.from_bytes(kept.streams)
            if kept.data_start is not None:
                self.keep_data_start(RngStates.from_bytes(kept.data_start))
            if kept.buffers is not None:
                self._buffers.keep_record(target, states.stage, kept.buffers, own_board())
            self._keep_rng_states(target, states)
            known = {states.stage: states}
        if known and not lost:  # on all ranks or on none: the rank that keeps them may be new
            newest = known.get(stage, known[min(known)])
            self._rng_replicas.exchange(target, lambda: self._own_state(target, newest))
        return lost


def manager_of(call: HPCallWrapper | None) -> CheckpointManager | None:
    """Return the manager that keeps the state of the running block.

    Args:
        call: the running wrapper, or None outside of a block.

    Returns:
        None outside of a block, and as long as nothing in the block keeps its state.

    Raises:
        TypeError: something else than a :class:`CheckpointManager` keeps it.
    """
    keeper = call.checkpoint_manager if call is not None else None
    if keeper is not None and not isinstance(keeper, CheckpointManager):
        raise TypeError(f"checkpoint_manager must be a CheckpointManager, not {type(keeper).__name__}")
    return keeper
