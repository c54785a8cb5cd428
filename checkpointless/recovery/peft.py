"""Restores fine-tuning with adapters: frozen base weights are kept and filled once, the adapters each time."""

from __future__ import annotations

from typing import Any

import torch

from checkpointless.recovery.decide import Verdict
from checkpointless.recovery.manager import CheckpointManager, LiveTrainer, journal_of
from checkpointless.transfer.tensor_entry import Key


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
        **kwargs: the keyword arguments of ``CheckpointManager``, without ``tiers``.

    Raises:
        ValueError: as of ``CheckpointManager``, or ``tiers`` are given.

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
        if self._copies:
            raise ValueError("fine-tuning with adapters keeps no copies in tiers: leave out tiers")

    @property
    def params_to_save(self) -> set[str]:
        """The names of all parameters and buffers that training may change."""
        return self._base_model.trained

    @params_to_save.setter
    def params_to_save(self, names: set[str]) -> None:
        self._base_model.trained = names

    @property
    def base_model_weights(self) -> dict[Key, torch.Tensor] | None:
        """The frozen weights by key; None before they were whole for the first time."""
        return self._base_model.weights

    @property
    def base_model_keys_to_extract(self) -> list[Key] | None:
        """The keys of the frozen weights, in the order in which they are sent; None if there are no weights yet."""
        return None if self._base_model.weights is None else list(self._base_model.weights)

    def is_adapter_key(self, key: str | tuple[Any, ...]) -> bool:
        """Return whether a tensor belongs to what training changes, and not to the base model.

        Args:
            key: the tensor's name; or its key in the state
                (:class:`~checkpointless.state.module_tensors.TrainingTensors`), where everything that belongs to
                an optimizer is an adapter's; or a tuple of the name and the parameter itself, which counts as an
                adapter's if it is trained.
        """
        return self._base_model.is_trained(key)

    def save_checkpoint(self, trainer: LiveTrainer) -> None:
        """Hold the state of ``trainer`` as it is now, and the base model's weights if they are not kept yet."""
        self.maybe_save_base_model(trainer)
        super().save_checkpoint(trainer)

    def maybe_save_base_model(self, trainer: LiveTrainer) -> None:
        """Keep references to the base model's weights, if they are not kept yet.

        Args:
            trainer: a trainer whose weights are whole and whose strategy has ``journal()``.
        """
        if self._base_model.weights is None:
            self._base_model.keep(journal_of(trainer).state.tensors())

    def try_base_model_checkpointless_load(self, trainer: LiveTrainer) -> dict[str, Any] | None:
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
        state = journal_of(trainer).state
        decision = self._decide(state)
        if decision.verdict is not Verdict.RESUME:
            self.refusal = decision.reason
            return None
        self.bytes_received += self._base_model.restore(state, decision, self.memory_budget_bytes)
        return {"state_dict": dict(self.base_model_weights or {})}
