"""Keeps the state of a rank across a restart, and gives it back to the rank itself or to its peers.

Tensors with the same holders move together: all ranks go through the replica groups that they are in, in ascending
order, and fill or are filled. So no two ranks wait for each other.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist

from checkpointless.inprocess import HPCallWrapper, active_call_wrapper
from checkpointless.inprocess.communicators.helper_thread import run_in_helper_thread
from checkpointless.inprocess.exceptions import make_room
from checkpointless.inprocess.memory import peak_growth
from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.inprocess.wrap import HandedOver, emit_event, span
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.recovery.decide import Decision, Parts, RankReport, Verdict, decide, peers_of
from checkpointless.replication.handover import Saves, Snapshot, clear, hand_over, offer, take_over
from checkpointless.replication.host_memory import HostMemoryPool
from checkpointless.replication.tiers import Copies, Tier
from checkpointless.state.held_state import HeldState
from checkpointless.state.journal import StepJournal
from checkpointless.state.module_tensors import TrainingTensors
from checkpointless.state.port import DATA, MODEL, PARAMETER, TrainingState, split
from checkpointless.state.rank_local.state import RankLocalKeeper, RankLocalState, differing
from checkpointless.state.serialization.digest import MemoryChecksumManager, digest_value
from checkpointless.state.serialization.state_tree import Tree
from checkpointless.transfer.exchange import all_gather_json
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import (
    MEMORY_BUDGET_BYTES,
    Fill,
    OnBucket,
    TransferReport,
    receive_state,
    send_state,
)

# --- What all ranks decide together -------------------------------------------------------------------------------


def _report(
    state: TrainingState,
    held: HeldState | None,
    own: RankLocalState,
    compare_digests: bool,
    begun: int,
    saves: Saves,
) -> RankReport:
    named = state.groups()
    groups = tuple(named)
    report = RankReport(
        dist.get_rank(),
        None,
        False,
        False,
        groups,
        streams=own.streams.known(),
        begun=begun,
        examples=tuple(named.values()) if len(named) > 1 else (),
        reduced=state.are_reduced,
    )
    if held is None or held.commit.committed < 0 or not (held.moments or held.commit.torn):
        return report
    digests = held.digests if compare_digests else None
    return replace(
        report,
        committed=held.commit.committed,
        ready=held.commit.ready,
        torn=held.commit.torn,
        digests=tuple(digests.get(group, "") for group in groups) if digests is not None else (),
        stages=tuple(int(stage) for stage in sorted(held.moments)),
        fit=held.fit,
        offset=held.offset,
        saves=tuple(saves),
        given_up=held.given_up,
    )


def _find_loss(held: HeldState | None, own: RankLocalState, own_parts: _OwnParts, decision: Decision) -> str:
    """Give every rank its streams; return why what ranks alone had is lost, "" if it is not. Collective."""
    target, _ = moment = decision.moment
    lost = own.find_streams(*moment)
    if lost:
        return (
            f"the random streams of rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} after step "
            f"{target} are lost: neither a process, nor a board, nor another node has them"
        )
    lost_parts = _find_lost_parts(held, own_parts, decision)
    if lost_parts:
        return (
            f"{', '.join(lost_parts)} differed from rank to rank, and that of rank "
            f"{', '.join(map(str, sorted(decision.refills)))} was lost with its process"
        )
    buffers = held.buffers.get(moment) if held is not None else None
    known = held.moments.get(moment[1]) if held is not None else None
    objects = known.objects if known is not None else {}
    lost_buffers = own.find_lost_buffers(moment, buffers, decision.peers(), objects)
    if lost_buffers:
        rank, reason = min(lost_buffers.items())
        return f"the process of rank {rank} was lost, and {reason}"
    return ""


def _find_lost_parts(held: HeldState | None, own_parts: _OwnParts, decision: Decision) -> list[str]:
    """Return which parts of the training data are lost: a peer's replaces one only if all are equal. Collective.

    Of other parts a peer's is taken, with a warning: a callback may keep times of day.
    """
    if not decision.refills:
        return []
    rank = dist.get_rank()
    mine: dict[str, str] | None = None
    if held is not None and rank not in decision.refills:
        found = held.snapshots(decision.target if rank in decision.redo else None).get(decision.moment[1])
        parts = own_parts(found.objects) if found is not None else {}
        mine = {name: digest_value(part) for name, part in parts.items()}
    differ = differing([each for each in all_gather_json(mine) if each is not None])
    lost = sorted(name for name in differ if name.startswith(DATA))
    for name in sorted(differ.difference(lost)):
        logger.warning("%s differs from rank to rank: rank %s gets a peer's", name, sorted(decision.refills))
    return lost


logger = logging.getLogger(__name__)
_OwnParts: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]  # of a state, by name


class _LiveTrainer(Protocol):
    """A trainer whose strategy has ``journal()`` and ``restored_from_memory()``."""

    @property
    def strategy(self) -> Any:  # Any: what a framework's types do not know
        """The strategy."""


class CheckpointManager(RankLocalKeeper):
    """Restores training from memory after a fault: keeps the state, decides, fills, verifies.

    A rank whose process lived through the fault keeps references to its model and optimizer (no copy). After the
    block was entered again and everything was rebuilt, all ranks decide together at which step to resume
    (:mod:`checkpointless.recovery.decide`). Each rank takes its own state back or is filled by its replicas. The
    held state is dropped only when the new state is complete.

    Args:
        enable_checksum: compare the replicas of every shard before a recovery. With three or more holders, one that
            differs is refilled; with two, the recovery is refused.
        enable_offload: keep the held state in pinned host memory while everything is rebuilt, unless it is in host
            memory already or an update is pending.
        allow_restart_from_scratch: if neither memory nor storage holds the state, start over at step 0 instead of
            ending the job.
        memory_budget_bytes: limit for the transfer buffers of each rank, in bytes.
        rng_replication_jump: distance in ranks at which a copy of a rank's random streams is kept, in case its node
            is lost. None: on the next node, if there are several. 0: no copy.
        tiers: tiers that keep copies in case all holders of a shard are lost at once, each at most once:
            :class:`~checkpointless.recovery.NeighborMemory`, :class:`~checkpointless.recovery.LocalDirectory`,
            :class:`~checkpointless.recovery.SharedDirectory`.

    Raises:
        ValueError: ``memory_budget_bytes`` is not positive, ``rng_replication_jump`` is negative, or a tier is
            given twice.

    Attributes:
        verdict: the verdict of the last recovery; None if there was none.
        was_filled: whether the last recovery gave this rank a peer's state.
        kept: what stays built over the fault, with the number of the fit that it belongs to, until training has
            resumed; None: nothing.
        saves: what a strategy knows about the checkpoints of its newest step.
        checksum_manager: computes the digests of tensors.
        refusal: why the last recovery from memory was refused ("" if it was not).
    """

    def __init__(
        self,
        enable_checksum: bool = False,
        enable_offload: bool = False,
        allow_restart_from_scratch: bool = False,
        memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
        rng_replication_jump: int | None = None,
        tiers: Sequence[Tier] = (),
    ) -> None:
        if memory_budget_bytes < 1:
            raise ValueError(f"memory_budget_bytes must be positive, not {memory_budget_bytes}")
        super().__init__(rng_replication_jump)
        self.memory_budget_bytes = memory_budget_bytes
        self.enable_offload = enable_offload
        self.allow_restart_from_scratch = allow_restart_from_scratch
        self.checksum_manager = MemoryChecksumManager(enable_checksum)
        self.copies = Copies(tiers)
        self._host_memory = HostMemoryPool()
        self._refill = _Refill()
        self.refusal = ""
        self._held: HeldState | None = None
        self._attached: StepJournal | None = None
        self.verdict: Verdict | None = None
        self.was_filled = False
        self.kept: tuple[int, Any] | None = None
        self.saves: Any = None  # Any: the Saves of a strategy, a floor above
        self._begun = 0
        self._lost_saves: Saves = ()  # of the process before this one
        self._attached_fit = 1, 0  # the fit's number, and the steps of the job before it

    @property
    def tiers(self) -> Sequence[Tier]:
        """The tiers in which copies of the state are kept, the cheapest first."""
        return self.copies.tiers

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

    def attach(self, journal: StepJournal, step: int) -> None:
        """Record that the rank's state is whole, is the state after ``step``, and lives in a training from now on.

        The held state is dropped here and not earlier: until the trainer has loaded everything, a further fault
        goes back to it. If there are tiers, this is a collective.
        """
        self._attached = journal
        self._attached_fit = max(self.fits.number, 1), self.fits.offset
        self._held = self.kept = None
        self._lost_saves = ()
        clear()
        self._begun = self.fits.number
        self.parameter_update_lock.set_committed(step)
        call = active_call_wrapper()
        if call is not None:
            call.steps.begin_after(step)
            if isinstance(journal.state, TrainingTensors):
                call.pace.begin(journal.state.modules, journal.state.wrappers)
            if self.copies:
                self.copies.begin(call.generation, step, call.facts, journal.state.holders())

    def make_copies(self, step: int) -> None:
        """Begin to copy this rank's state after ``step``, just committed, into the tiers in which that is due.
        Collective.
        """
        journal = self._attached
        if self.copies and journal is not None:
            fit, offset = self._attached_fit
            self.copies.make(step, lambda: Snapshot.taken(journal, self.own, step, fit, offset))

    def replicate_rng_states(self, step: int) -> None:
        """Have what is this rank's own after ``step`` kept on another node, too, if there is one. Collective.

        It has been stored: random streams, those that the order of its data is drawn from, and buffers.
        """
        self.own.replicate(step, self._attached.state if self._attached is not None else None)
        if self.copies:
            self.copies.settle(step)

    # --- when a fault comes -----------------------------------------------------------------------------------

    def save_checkpoint(self, trainer: _LiveTrainer) -> None:
        """Hold the state of ``trainer``, whose strategy has ``journal()``, as references and not copies."""
        self._hold(trainer.strategy.journal())

    def hold(self, error: BaseException | None = None) -> None:
        """Hold the state of the generation that is over, after ``error`` has ended the block because of a fault.

        If that generation had not got its state back yet, what was held before stays.
        """
        self.copies.leave()
        attached, self._attached = self._attached, None
        if attached is not None:
            self._hold(attached)
        elif self._held is not None:
            self._held.outlive(make_room(error))
        self.parameter_update_lock.forget()
        self.fits.number = self.fits.offset = 0

    def hand_over(self, high_water: int, address: str = "") -> HandedOver:
        """Hand the state to a successor of this process, which ends; or offer it at ``address`` to one on another
        node.

        ``high_water`` is the highest optimizer step that any rank was ever seen to commit (-1: none).
        """
        begun, leaves = max(self._begun, self.fits.number), None
        if self._held is not None:
            leaves = Snapshot(self._held, begun, self.fits.finished, self._unfinished_saves())
        if address:
            source, problem = offer(leaves, self.own, high_water, address)
            return HandedOver(0, problem, source, clear)
        return HandedOver(*hand_over(leaves, self.own, high_water))

    def _take_over(self) -> None:
        left = take_over(self.own)
        if left is not None:
            self._held, self._lost_saves = left.held, left.saves
            self._begun = max(self._begun, left.begun)
            self.fits.finished = {**left.finished, **self.fits.finished}

    def _unfinished_saves(self) -> Saves:
        return (*self._lost_saves, *(self.saves.unfinished if self.saves is not None else ()))

    def end(self) -> None:
        """Let go of the copies in tiers, since the block has returned on all ranks."""
        self.copies.end()

    def _hold(self, journal: StepJournal) -> None:
        commit = self.parameter_update_lock.state()
        held = HeldState.of(journal, commit, self.checksum_manager, *self._attached_fit, self._is_frozen)
        self._held = held
        self.kept = None
        if journal.built is not None:
            reason = _why_not_kept(journal, held.commit, self.enable_offload)
            if reason is None:
                self.kept = self._attached_fit[0], journal.built
            else:
                emit_event(EventName.WARM, kept=False, reason=reason)
        self.maybe_offload_checkpoint()

    def _is_frozen(self, key: Key) -> bool:
        return False

    def maybe_offload_checkpoint(self) -> None:
        """Move the held tensors to pinned host memory, if ``enable_offload`` is set and no update can be applied to
        them.
        """
        held = self._held
        if self.enable_offload and held is not None and held.journal is None:
            held.offload(self._host_memory)

    def delete_checkpoint(self) -> None:
        """Drop the held state and the random streams, and free their memory, since the state came from storage."""
        self._held = self.kept = None
        self._refill.forget()
        self.own.forget()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    # --- when the block has been entered again ------------------------------------------------------------------

    def try_checkpointless_load(self, trainer: _LiveTrainer) -> dict[str, Any] | None:
        """Recover ``trainer``, freshly built, with its strategy set up, from memory. Collective: every rank calls
        it.

        Return the checkpoint for Lightning to load, with its tensors in place; None if there is nothing to recover
        or if recovery is refused (see :meth:`recover`).
        """
        objects = self.recover(trainer.strategy.journal())
        if objects is None or "checkpoint" not in objects:
            return objects
        trainer.strategy.restored_from_memory(objects)
        checkpoint: dict[str, Any] = objects["checkpoint"]
        return checkpoint

    def recover(self, journal: StepJournal) -> dict[str, Any] | None:
        """Recover a training from memory, given the journal of the freshly built one. Collective: every rank calls
        it.

        Return the non-tensor state to load, with the tensors in place; None if there is nothing to recover
        (:attr:`verdict`: a first start, or a fit that was over) or if recovery is refused (:attr:`refusal` says
        why).
        """
        self.resumed_at = None
        if self._held is not None:
            self._held.use()
        state, own_parts = journal.state, journal.front.own_parts
        decision = self._ask_memory(state, own_parts)
        if self.refusal and self.copies and self._take_copies():
            decision = self._ask_memory(state, own_parts)
        self.verdict = decision.verdict
        if decision.verdict in (Verdict.START, Verdict.SKIP):
            return None
        if self.refusal:
            logger.error("recovery from memory is not possible: %s", self.refusal)
            return None
        objects = self._restore(state, decision)
        with span(EventName.VERIFY, refilled=self.was_filled) as fields:
            journal.restore(*decision.moment, objects)
            fields.update(peak_growth())
        self.resumed_at = decision.moment
        return objects

    def _ask_memory(self, state: TrainingState, own_parts: _OwnParts) -> Decision:
        """Decide how the job resumes from what the ranks hold; :attr:`refusal` says why it cannot. Collective."""
        decision = self._decide(state)
        self.refusal = decision.reason
        if decision.verdict in (Verdict.START, Verdict.SKIP):
            return decision
        self.fits.offset = decision.offset
        if decision.verdict is Verdict.RESUME:
            self.refusal = _find_loss(self._held, self.own, own_parts, decision)
        return decision

    def _take_copies(self) -> bool:
        """Hold, on all ranks, the newest step that tiers and living ranks have; or return False. Collective."""
        snapshot, why = self.copies.take(self._held, self.refusal)
        if why:
            self.refusal = f"{self.refusal}; {why}"
            return False
        if snapshot is not None:
            self._refill.forget()
            self._held = snapshot.held
            self._begun = max(self._begun, snapshot.held.fit)
            self.own.streams.forget()
            snapshot.own.keep_in(self.own)
        return True

    def checkpointless_recovery_feasible(
        self, trainer: _LiveTrainer, include_checksum_verification: bool = True
    ) -> bool:
        """Return whether the job could resume from memory now, as a freshly built ``trainer`` finds it. Collective.

        ``include_checksum_verification``: also compare digests, if they are enabled.
        """
        decision = self._decide(trainer.strategy.journal().state, include_checksum_verification)
        return decision.verdict is Verdict.RESUME and not self.own.find_streams(*decision.moment)

    def _decide(self, state: TrainingState, compare_digests: bool = True) -> Decision:
        """Decide with all other ranks how the job resumes. Collective."""
        if self._held is None:
            self._take_over()
        call, own = active_call_wrapper(), self.own
        high_water = call.high_water if call is not None else -1
        if call is not None:
            call.steps.recovers = True
        with span(EventName.DECIDE) as fields:
            saves = self._unfinished_saves()
            mine = _report(state, self._held, own, compare_digests, self._begun, saves).to_json()
            answers = all_gather_json({"report": mine, "keeps": own.kept_streams()})
            decision = decide(RankReport.gathered(answers, own.replicas.jump), high_water, max(self.fits.number, 1))
            fields.update(
                verdict=decision.verdict.value,
                target=decision.target,
                redo=list(decision.redo),
                refills={str(rank): list(sources) for rank, sources in decision.refills.items()},
                reason=decision.reason,
            )
            if any(len(parts) > 1 for parts in decision.parts.values()):
                fields.update(
                    parts={
                        str(rank): [{"holders": len(group), "sources": list(sources)} for group, sources in parts]
                        for rank, parts in decision.parts.items()
                    }
                )
        return decision

    def _restore(self, state: TrainingState, decision: Decision) -> dict[str, Any]:
        """Put the tensors in place as decided, and return the non-tensor state. Collective."""
        rank, held = dist.get_rank(), self._held
        target, _ = moment = decision.moment
        is_filled = rank in decision.refills
        own: dict[str, Any] = {}
        if held is not None:
            if rank in decision.redo:
                held.redo(target)
            held.let_trainer_go()
            held.is_superseded = is_filled
        self.was_filled = is_filled
        if held is not None and not is_filled:
            own = held.go_back_to(moment[1])
        elif held is not None and self.kept is not None:  # its tensors are filled now
            held.tear()
        with span(EventName.TRANSFER, refills=len(decision.refills)) as fields:
            objects, report = self._refill.move(
                state,
                decision.parts,
                held.tensors if held is not None else None,
                own,
                memory_budget_bytes=self.memory_budget_bytes,
                on_bucket=_announce_transfer(target),
            )
            if is_filled:
                self._refill.forget()
            buffers = held.buffers.get(moment) if held is not None else None
            self.own.put_buffers(state, moment, buffers, objects, is_filled)
            fields.update(asdict(report))
        restored: dict[str, Any] = objects
        return restored


# --- The block that is running, and its manager -------------------------------------------------------------------


def manager_of(call: HPCallWrapper | None) -> CheckpointManager | None:
    """Return the manager that keeps the state of a block; None as long as nothing in it does, or outside of it."""
    return cast("CheckpointManager | None", call.checkpoint_manager) if call is not None else None


def running_block(call: HPCallWrapper | None) -> HPCallWrapper:
    """Return ``call`` or, if None, the wrapper whose block is running; ``ValueError`` if none is."""
    call = call if call is not None else active_call_wrapper()
    if call is None:
        raise ValueError("no block is running: train inside of a function that @HPWrapper() wraps")
    return call


# --- Fine-tuning with adapters ------------------------------------------------------------------------------------


class PEFTCheckpointManager(CheckpointManager):
    """A :class:`CheckpointManager` for fine-tuning with adapters (LoRA and the like) on a frozen base model.

    The frozen weights are held by reference like all the rest. What a rank has already is not sent to it: a process
    that lived through a fault keeps them even where its own adapters have to be filled, and a new process keeps
    those that arrived before its recovery failed.

    Args:
        *args: the arguments of ``CheckpointManager``. With ``enable_checksum``, the base weights are compared
            between replicas, too.
        **kwargs: the keyword arguments of ``CheckpointManager``, without ``tiers``.

    Raises:
        ValueError: as of ``CheckpointManager``, or ``tiers`` are given.

    Attributes:
        params_to_save: the names of all parameters and buffers that training may change; the strategy sets it when
            the adapters have been added to the model. While it is empty, nothing counts as frozen.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.copies:
            raise ValueError("fine-tuning with adapters keeps no copies in tiers: leave out tiers")
        self.params_to_save: set[str] = set()

    @property
    def base_model_weights(self) -> dict[Key, torch.Tensor] | None:
        """The frozen weights by key, held or of the running model; None before they were whole."""
        if self._held is not None:
            return _part_of(self._held.tensors, self._is_frozen)
        return None if self._attached is None else _part_of(self._attached.state.tensors(), self._is_frozen)

    @property
    def base_model_keys_to_extract(self) -> list[Key] | None:
        """The keys of the frozen weights, in the order in which they are sent; None if there are no weights yet."""
        weights = self.base_model_weights
        return None if weights is None else list(weights)

    def is_adapter_key(self, key: str | tuple[Any, ...]) -> bool:
        """Return whether a tensor belongs to what training changes, and not to the base model.

        Args:
            key: the tensor's name; or its key in the state
                (:class:`~checkpointless.state.module_tensors.TrainingTensors`), where everything that belongs to
                an optimizer is an adapter's; or a tuple of the name and the parameter itself, which counts as an
                adapter's if it is trained.
        """
        if isinstance(key, tuple):
            if len(key) > 1 and isinstance(key[1], torch.Tensor):
                return key[1].requires_grad
            return key[0] != "model" or self.is_adapter_key(str(key[-1]))
        return key in self.params_to_save or ".adapter." in key or key.endswith(".adapters")

    def _is_frozen(self, key: Key) -> bool:
        return bool(self.params_to_save) and not self.is_adapter_key(key)

    def maybe_save_base_model(self, trainer: _LiveTrainer) -> None:
        """Hold the state of ``trainer``, whose weights are whole, with the base model's, if none is known yet."""
        if self.base_model_weights is None:
            self.save_checkpoint(trainer)

    def try_base_model_checkpointless_load(self, trainer: _LiveTrainer) -> dict[str, Any] | None:
        """Put the base model's weights of ``trainer`` in place, from this rank's memory or a peer's. Collective.

        Call this on a freshly built trainer with adapters to have the weights early; else
        :meth:`try_checkpointless_load` puts them in place. Return ``{"state_dict": {key: tensor}}``; None if memory
        cannot give the state (:attr:`refusal` says why; "": there is no state yet).
        """
        self.refusal = ""
        state = trainer.strategy.journal().state
        decision = self._decide(state)
        if decision.verdict is not Verdict.RESUME:
            self.refusal = decision.reason
            return None
        mine = None if self._held is None else _part_of(self._held.tensors, self._is_frozen)
        budget = self.memory_budget_bytes
        self._refill.move(state, decision.parts, mine, {}, memory_budget_bytes=budget)
        return {"state_dict": _part_of(state.tensors(), self._is_frozen)}


def _part_of(tensors: Mapping[Key, torch.Tensor], is_meant: Callable[[Key], bool]) -> dict[Key, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if is_meant(key)}


def _why_not_kept(journal: StepJournal, commit: CommitState, is_offloaded: bool) -> str | None:
    """Return why nothing of a training stays built over the fault; None: what is built does."""
    if is_offloaded:
        return "the state is moved to host memory"
    return "the update of a step is half made" if commit.torn else journal.built.unfit()


def _announce_transfer(target: int) -> OnBucket:
    """Return what announces the phase ``transfer`` to fault specs when half of the buckets are sent."""

    def on_bucket(position: int, count: int, payload: torch.Tensor) -> torch.Tensor:
        call = active_call_wrapper()
        if call is None or position != count // 2:
            return payload
        copies: list[torch.Tensor] = []

        def copy() -> torch.Tensor:
            copies.append(payload.clone())  # the bucket itself may be a part of the state
            return copies[0]

        call.enter_phase("transfer", target, copy)
        return copies[0] if copies else payload

    return on_bucket


# --- Putting tensors in their new place ---------------------------------------------------------------------------


class _Refill:
    """Moves the state, and remembers in ``arrived`` what an interrupted transfer brought, until :meth:`forget`."""

    def __init__(self) -> None:
        self.arrived: Mapping[Key, torch.Tensor] = {}

    def forget(self) -> None:
        """Let go of what has arrived, since it is whole and kept elsewhere, or of no use."""
        self.arrived = {}

    def move(
        self,
        state: TrainingState,
        refills: Mapping[int, Parts],
        tensors: dict[Key, torch.Tensor] | None,
        objects: Tree,
        *,
        memory_budget_bytes: int,
        on_bucket: OnBucket | None = None,
    ) -> tuple[Tree, TransferReport]:
        """Put tensors in place in ``state``. Every rank calls it that fills or is filled.

        ``refills``: by rank to fill, alike everywhere; ``tensors``: what this rank holds, in the order of every
        holder, each replaced as its successor is filled. Return the non-tensor state, and what was moved. Raises
        ``RuntimeError`` if the decision does not fit, ``TransferError`` if a source was lost or a bucket damaged.
        """
        rank = dist.get_rank()
        if rank in refills:
            return self._fill(state, refills[rank], tensors or {}, memory_budget_bytes)
        if tensors is None:
            raise RuntimeError(f"rank {rank} was decided to be healthy but holds no state")
        self._serve(state, tensors, objects, refills, on_bucket)
        return objects, self._take_back(state, tensors)

    def _fill(
        self, state: TrainingState, parts: Parts, held: Mapping[Key, torch.Tensor], memory_budget_bytes: int
    ) -> tuple[Tree, TransferReport]:
        objects: dict[Group, Any] = {}
        reports = []
        for group, sources in sorted(parts):
            ordered = _peers_first(sources, parts)
            objects[group], report = self._receive(state, ordered, held, memory_budget_bytes)
            reports.append(report)
        whole = objects[min(objects)] if peers_of(parts) else _join_objects(state, objects)
        return whole, reports[0] if len(reports) == 1 else TransferReport.of(reports)

    def _receive(
        self,
        state: TrainingState,
        sources: Sequence[int],
        held: Mapping[Key, torch.Tensor],
        memory_budget_bytes: int,
    ) -> tuple[Tree, TransferReport]:
        """Receive a part from ``sources``; keep what an interrupted transfer brought or this rank still had."""
        known = {**held, **self.arrived}

        def room(entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
            whole = state.allocate(entries)
            self.arrived = {**self.arrived, **{each.key: whole[each.key] for each in entries if each.key in whole}}
            return whole

        return run_in_helper_thread(
            lambda: receive_state(sources, room, known=known, memory_budget_bytes=memory_budget_bytes)
        )

    @staticmethod
    def _serve(
        state: TrainingState,
        tensors: Mapping[Key, torch.Tensor],
        objects: Tree,
        refills: Mapping[int, Parts],
        on_bucket: OnBucket | None,
    ) -> None:
        """Fill every rank of which this rank is a source.

        Non-tensor state goes with a rank's first part, from a holder of all of them; if there is none, with each.
        """
        rank = dist.get_rank()
        fills: dict[Group, list[Fill]] = defaultdict(list)
        asked: set[Group] = set()  # with which objects go
        for destination, parts in sorted(refills.items()):
            first = min(parts)[0]
            for group, sources in parts:
                if rank in sources:
                    ordered = _peers_first(sources, parts)
                    fills[group].append(Fill(destination, ordered.index(rank), len(ordered)))
                    asked |= {group} if group == first or not peers_of(parts) else set()
        mine = split(state, tensors) if fills else {}
        for group in mine:
            for destination in group:
                if destination in refills and group not in dict(refills[destination]):
                    raise RuntimeError(
                        f"rank {destination} is to be filled and has said nothing of {next(iter(mine[group]))}"
                    )
        for group in sorted(fills):
            present, told = mine.get(group, {}), objects if group in asked else {}
            run_in_helper_thread(partial(send_state, present, told, fills[group], on_bucket=on_bucket))

    @staticmethod
    def _take_back(state: TrainingState, tensors: dict[Key, torch.Tensor]) -> TransferReport:
        """Put this rank's tensors in their new place: without a copy where that is possible, else copied."""
        began_s = time.monotonic()
        room = state.allocate([TensorEntry.of(key, each) for key, each in tensors.items()], tensors)
        with torch.no_grad():
            for key in list(tensors):
                if room[key] is not tensors[key]:
                    room[key].copy_(tensors[key])
                    tensors[key] = room[key]  # one by one: little of the state exists twice
        kept = sum(tensor.nbytes for tensor in tensors.values())
        return TransferReport(kept=kept, seconds=time.monotonic() - began_s)


def _peers_first(sources: Sequence[int], parts: Parts) -> tuple[int, ...]:
    """Return the sources of a part in their places: first those that hold all parts, the first gives objects."""
    peers = {*peers_of(parts)}
    return tuple(sorted(sources, key=lambda source: (source not in peers, source)))


def _join_objects(state: TrainingState, objects: Mapping[Group, dict[str, Any]]) -> dict[str, Any]:
    """Make one snapshot's objects of those of a holder of each part, which are right for its tensors."""
    first = objects[min(objects)]
    joined: dict[Key, Any] = {}
    for group, theirs in objects.items():
        plain = theirs[MODEL]["state"]
        keys = {(*key, PARAMETER): key for key in plain}
        for key in state.replica_groups(keys).get(group, ()):
            joined[keys[key]] = plain[keys[key]]
    return {**first, MODEL: {**first[MODEL], "state": joined}}
