"""What updates own, and nothing else may change: weights and the optimizers' state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from checkpointless.inprocess import UnrecoverableError
from checkpointless.state.serialization.digest import MemoryChecksumManager
from checkpointless.state.serialization.tensor_memory import local_part
from checkpointless.transfer.tensor_entry import Key

_CHANGED = (
    "{} is changed {}: after a fault it would be changed once more, or be that of no step. Change it within the "
    "update (the optimizer's register_step_post_hook), or make it a buffer if no optimizer updates it"
)


class Owned:
    """Tensors that nothing but an update changes.

    Args:
        tensors: returns them, by key.
        take: returns what is compared of tensors, by key. Default: digests of all bytes.
    """

    def __init__(
        self,
        tensors: Callable[[], Mapping[Key, torch.Tensor]],
        take: Callable[[dict[Key, torch.Tensor]], Mapping[Key, object]] | None = None,
    ) -> None:
        self._tensors = tensors
        self._take = MemoryChecksumManager().digest_each if take is None else take
        self._noted: Mapping[Key, object] = {}

    def note(self) -> None:
        """Note them as they are now."""
        self._noted = self._now()

    def forget(self) -> None:
        """Compare nothing until they are noted again."""
        self._noted = {}

    def require_unchanged(self, when: str, title: Callable[[Key], str]) -> None:
        """Refuse that a tensor has changed since :meth:`note`.

        Args:
            when: where a loop is, for people.
            title: returns what the tensor of a key is, for people.

        Raises:
            UnrecoverableError: one has.
        """
        key = self.changed()
        if key is not None:
            raise UnrecoverableError(_CHANGED.format(title(key), when))

    def changed(self) -> Key | None:
        """Return the key of a tensor that is gone or is not as it was noted; None: there is none."""
        now = self._now() if self._noted else {}
        return next((key for key, noted in self._noted.items() if key not in now or now[key] != noted), None)

    def _now(self) -> Mapping[Key, object]:
        return self._take({key: each.detach() for key, each in self._tensors().items()})


@contextmanager
def put_back(weights: Callable[[], Iterable[torch.Tensor]], when_back: Callable[[], None]) -> Iterator[None]:
    """Require that parameters are at the end, also on the way of an exception, what they were at the beginning.

    Args:
        weights: returns the parameters, each time in the same order.
        when_back: is called when they are.

    Raises:
        UnrecoverableError: the context is left in the usual way, and they are not.
    """
    owned = Owned(lambda: {("weight", index): local_part(each) for index, each in enumerate(weights())})
    owned.note()
    is_back = False
    try:
        yield
    finally:
        is_back = owned.changed() is None
        if is_back:
            when_back()
    if not is_back:
        raise UnrecoverableError("other weights stay behind other_weights(): what exchanges them puts them back")
