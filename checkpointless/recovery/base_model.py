"""The base model of a fine-tuning with adapters: frozen weights, which are kept and moved apart from the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.inprocess.wrap import span
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.recovery.decide import Decision
from checkpointless.recovery.refill import Refill
from checkpointless.state.held_state import HeldState, HostMemory
from checkpointless.state.port import TrainingState, split
from checkpointless.state.serialization.digest import MemoryChecksumManager
from checkpointless.transfer.exchange import all_gather_json
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key

_MODEL = "model"  # the first word of the key of a parameter or buffer


class BaseModel:
    """Keeps references to the frozen weights over all generations; as long as nothing is frozen, to none.

    Args:
        checksums: with it enabled, the weights of a rank that is refilled are compared with its sources'.

    Attributes:
        trained: the names of all parameters and buffers that training may change; while it is empty, nothing is
            frozen.
        weights: the frozen weights by key, in the order in which they are sent, as references to the running
            model's weights or, offloaded, as copies; None before they were whole for the first time.
    """

    def __init__(self, checksums: MemoryChecksumManager) -> None:
        self.trained: set[str] = set()
        self.weights: dict[Key, torch.Tensor] | None = None
        self._checksums = checksums
        self._offloaded = False
        self._memory = HostMemory()
        self._refill = Refill(adopts=True)

    def is_trained(self, key: str | tuple[Any, ...]) -> bool:
        """Return whether a tensor belongs to what training changes, and not to the base model.

        Args:
            key: the tensor's name; or its key in the state, where everything that belongs to an optimizer is
                trained; or a tuple of the name and the parameter itself.
        """
        if isinstance(key, tuple):
            if len(key) > 1 and isinstance(key[1], torch.Tensor):
                return key[1].requires_grad
            return key[0] != _MODEL or self.is_trained(str(key[-1]))
        return key in self.trained or ".adapter." in key or key.endswith(".adapters")

    def keep(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        """Keep references to the frozen weights among ``tensors``, which are whole."""
        if not self.trained:
            return
        self.weights = {key: tensor for key, tensor in tensors.items() if not self.is_trained(key)}
        self._offloaded = False

    def attached(self, state: TrainingState) -> None:
        """Keep the weights of ``state`` in place of those that were kept before."""
        if self.trained:
            self.keep(state.tensors())

    def part_from(self, held: HeldState) -> None:
        """Remove the frozen weights from ``held``; keep them if they are not kept yet."""
        if self.weights is None:
            self.keep(held.tensors)
        weights = self.weights or {}
        held.tensors = {key: tensor for key, tensor in held.tensors.items() if key not in weights}

    def kept(self) -> Mapping[Key, torch.Tensor]:
        """Return the frozen weights."""
        return self.weights or {}

    def take(self, weights: Mapping[Key, torch.Tensor]) -> None:
        """Keep ``weights``, in host memory, until those of a model are whole."""
        if weights:
            self.weights = dict(weights)

    def digests(self, state: TrainingState) -> Mapping[Group, str]:
        """Return the digests, by part, of the frozen weights in ``state``."""
        if not self.weights:
            return {}
        tensors = state.tensors()  # not the offloaded copies: another rank may not have offloaded
        parts = split(state, {key: tensors[key] for key in self.weights})
        return {group: self._checksums.digest_all(part) for group, part in parts.items()}

    def offload(self, held: HeldState) -> None:
        """Offload the frozen weights, and if there are none, all of ``held``. What adapters train is small."""
        if not self.trained:
            held.offload(self._memory)
        if self._offloaded or self.weights is None:
            return
        self.weights = self._memory.copies(self.weights)
        self._offloaded = True

    def restore(self, state: TrainingState, decision: Decision, memory_budget_bytes: int) -> int:
        """Put the frozen weights in place: this rank's own, or those of its sources if it has none. Collective.

        The weights that are kept stay kept, whatever happens to the rest.
        """
        if not self.trained:
            return 0
        lacking = self._ranks_without(decision)
        refills = {rank: decision.parts[rank] for rank in lacking}
        with span(EventName.TRANSFER, part="base model", refills=len(lacking)) as fields:
            mine = dict(self.weights or {})
            _, report = self._refill.move(state, refills, mine, {}, memory_budget_bytes=memory_budget_bytes)
            if dist.get_rank() in lacking:
                self.keep(self._refill.arrived)
                self._refill.forget()
            fields.update(asdict(report))
        return report.bytes

    def _ranks_without(self, decision: Decision) -> set[int]:
        """Return the ranks that must be given the frozen weights, the same on every rank. Collective."""
        if not decision.refills:
            return set()
        has_weights = self.weights is not None and not self._checksums.enabled
        everybody = all_gather_json(has_weights)
        return {rank for rank in decision.refills if not everybody[rank]}
