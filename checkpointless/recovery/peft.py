"""Restores fine-tuning with adapters: frozen base weights are kept and filled once, the adapters each time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from checkpointless.inprocess.context import aside, span
from checkpointless.recovery.decide import Decision, Verdict
from checkpointless.recovery.live_state import LiveState
from checkpointless.recovery.manager import CheckpointManager, HeldState
from checkpointless.transfer.exchange import all_gather_json
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import Fill, TransferReport, receive_state, send_state

_MODEL = "model"  # the first word of the key of a parameter or buffer


class PEFTCheckpointManager(CheckpointManager):
    """A :class:`CheckpointManager` for fine-tuning with adapters (LoRA and the like) on a frozen base model.

    From the first time that the base model's weights are whole, they are held by reference over all generations,
    apart from what training changes. A process that lived through a fault keeps them through any number of
    recoveries, even one in which its own adapters have to be filled. A new process is given them once, and keeps
    them if that recovery fails after they arrived. Adapters, optimizer and schedulers are restored each time.

    :attr:`params_to_save` determines what is frozen. While it is empty, nothing is frozen, and this manager behaves
    as a ``CheckpointManager``.

    Args:
        *args: the arguments of ``CheckpointManager``. With ``enable_checksum``, the base weights are compared
            between replicas, too, and those of a rank that is refilled are compared with its sources'.
        **kwargs: the keyword arguments of ``CheckpointManager``.

    Attributes:
        params_to_save: the names of all parameters and buffers that training may change; the strategy sets it when
            the adapters have been added to the model.
        base_model_weights: the frozen weights by key, as references to the running model's weights; None before
            they were whole for the first time.
        base_model_keys_to_extract: the keys of the frozen weights, in the order in which they are sent; None as
            long as ``base_model_weights`` is None.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params_to_save: set[str] = set()
        self.base_model_weights: dict[Key, torch.Tensor] | None = None
        self.base_model_keys_to_extract: list[Key] | None = None
        self._base_offloaded = False
        self._base_arrived: dict[Key, torch.Tensor] = {}  # what an interrupted transfer had room for, filled or not

    def is_adapter_key(self, key: str | tuple[Any, ...]) -> bool:
        """Return whether a tensor belongs to what training changes, and not to the base model.

        Args:
            key: the tensor's name; or its key in the state
                (:class:`~checkpointless.transfer.module_tensors.TrainingTensors`), where everything that belongs to
                an optimizer is an adapter's; or a tuple of the name and the parameter itself, which counts as an
                adapter's if it is trained.
        """
        if isinstance(key, tuple):
            if len(key) > 1 and isinstance(key[1], torch.Tensor):
                return key[1].requires_grad
            return key[0] != _MODEL or self.is_adapter_key(str(key[-1]))
        return key in self.params_to_save or ".adapter." in key or key.endswith(".adapters")

    # --- keeping --------------------------------------------------------------------------------------------------

    def maybe_save_base_model(self, trainer: Any) -> None:
        """Keep references to the base model's weights, if they are not kept yet.

        Args:
            trainer: a trainer whose weights are whole and whose strategy has ``live_state()``.
        """
        if self.base_model_weights is None:
            self._keep_base(trainer.strategy.live_state().tensors())

    @override
    def save_checkpoint(self, trainer: Any) -> None:
        """Hold the adapters' state of ``trainer`` as it is now, and the base model if it is not held yet.

        Args:
            trainer: a trainer whose strategy has ``live_state()``.
        """
        self.maybe_save_base_model(trainer)
        super().save_checkpoint(trainer)

    @override
    def attach(self, live: LiveState, step: int) -> None:
        """Record that the rank's state, base model included, is whole and lives in ``live`` from now on.

        Args:
            live: the state.
            step: the optimizer step that the state belongs to.
        """
        self._keep_base(live.tensors())
        super().attach(live, step)

    @override
    def maybe_offload_checkpoint(self) -> None:
        """Move the base model's weights to pinned host memory, if ``enable_offload`` is set.

        The adapters stay where they are, because they are small.
        """
        held = self._held
        base = self.base_model_weights
        if not self.enable_offload or self._base_offloaded or base is None or held is None or held.live is not None:
            return
        host = {
            key: torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            if tensor.device.type != "cpu"
            else tensor
            for key, tensor in base.items()
        }
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.base_model_weights = host
        self._base_offloaded = True

    @override
    def _hold(self, live: LiveState) -> None:
        super()._hold(live)
        held = self._held
        if held is None:
            return
        self._separate(held)
        if held.digest is not None and self.base_model_keys_to_extract:
            tensors = live.tensors()  # not the offloaded copies: another rank may not have offloaded
            base = {key: tensors[key] for key in self.base_model_keys_to_extract}
            held.digest += self.checksum_manager.digest_all(base)
        self.maybe_offload_checkpoint()

    def _separate(self, held: HeldState) -> None:
        """Remove from ``held`` the tensors that are kept as base weights."""
        if self.base_model_weights is None:
            self._keep_base(held.tensors)
        base = self.base_model_weights or {}
        held.tensors = {key: tensor for key, tensor in held.tensors.items() if key not in base}

    def _keep_base(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        """Keep references to the base weights among ``tensors``."""
        if not self.params_to_save:
            return
        self.base_model_keys_to_extract = [key for key in tensors if not self.is_adapter_key(key)]
        self.base_model_weights = {key: tensors[key] for key in self.base_model_keys_to_extract}
        self._base_offloaded = False

    # --- restoring ------------------------------------------------------------------------------------------------

    def try_base_model_checkpointless_load(self, trainer: Any) -> dict[str, Any] | None:
        """Put the base model's weights of ``trainer`` in place, from this rank's memory or a peer's. Collective.

        Call this method to have the weights early; otherwise :meth:`try_checkpointless_load` puts them in place.
        The base weights that are kept stay kept, whatever happens to the rest.

        Args:
            trainer: a freshly built trainer whose adapters have been added.

        Returns:
            ``{"state_dict": {key: tensor}}`` with the weights in place; None if memory cannot give the state
            (:attr:`refusal` says why; "": there is no state yet).
        """
        self.refusal = ""
        live: LiveState = trainer.strategy.live_state()
        decision = self._decide(live)
        if decision.verdict is not Verdict.RESUME:
            self.refusal = decision.reason
            return None
        self._restore_base(live, decision)
        return {"state_dict": dict(self.base_model_weights or {})}

    @override
    def _restore(self, live: LiveState, decision: Decision, target: int) -> dict[str, Any]:
        held = self._held
        if held is not None:
            if dist.get_rank() in decision.redo:
                self._redo(held, target)
            held.let_trainer_go()
            self._separate(held)
        self._restore_base(live, decision)
        return super()._restore(live, decision, target)

    def _restore_base(self, live: LiveState, decision: Decision) -> None:
        """Put the base weights in place: this rank's own, or those of its sources if it has none."""
        rank = dist.get_rank()
        lacking = self._ranks_without_base(decision)
        with span("transfer", part="base model", refills=len(lacking)) as fields:
            if rank in lacking:
                report = self._fill_base(live, decision.refills[rank])
            else:
                self._serve_base(decision, lacking, rank)
                report = self._take_base_back(live)
            self.bytes_received += report.bytes
            fields.update(asdict(report))

    def _ranks_without_base(self, decision: Decision) -> set[int]:
        """Return the ranks that must be given the base weights, the same on every rank. Collective."""
        if not decision.refills:
            return set()
        has_base = self.base_model_weights is not None and not self.enable_checksum
        return {rank for rank, has in enumerate(all_gather_json(has_base)) if not has and rank in decision.refills}

    def _fill_base(self, live: LiveState, sources: Sequence[int]) -> TransferReport:
        """Receive the base weights from ``sources``; keep those that are already here and right."""
        known = {**(self.base_model_weights or {}), **self._base_arrived}
        keys: list[Key] = []

        def room(entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
            keys.extend(entry.key for entry in entries)
            live.adopt({key: known[key] for key in keys if key in known})
            whole = live.room(entries)
            self._base_arrived = {key: whole[key] for key in keys if key in whole}
            return whole

        _, report = aside(
            lambda: receive_state(sources, room, known=known, memory_budget_bytes=self.memory_budget_bytes)
        )
        self._keep_base(self._base_arrived)
        self._base_arrived = {}
        return report

    def _serve_base(self, decision: Decision, lacking: Iterable[int], rank: int) -> None:
        """Fill every rank that lacks the base weights and has this rank as a source."""
        fills = [
            Fill(destination, decision.refills[destination].index(rank), len(decision.refills[destination]))
            for destination in sorted(lacking)
            if rank in decision.refills[destination]
        ]
        if fills:
            base = self.base_model_weights or {}
            frozen = {key: base[key] for key in self.base_model_keys_to_extract or ()}
            aside(lambda: send_state(frozen, {}, fills))

    def _take_base_back(self, live: LiveState) -> TransferReport:
        """Put the kept base weights in their new place: without a copy where that is possible, else copied."""
        began_s = time.monotonic()
        base = self.base_model_weights or {}
        adopted = live.adopt(base)
        copied = [key for key in base if key not in adopted]
        room = live.room([TensorEntry.of(key, base[key]) for key in copied])
        with torch.no_grad():
            for key in copied:
                room[key].copy_(base[key])
        kept = sum(tensor.numel() * tensor.dtype.itemsize for tensor in base.values())
        return TransferReport(kept=kept, seconds=time.monotonic() - began_s)
