"""Copies of modules' buffers, which a step changes before its commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from checkpointless.state.serialization.tensor_memory import local_part
from checkpointless.transfer.sharded_tensors import is_sharded
from checkpointless.transfer.tensor_entry import Key

_SMALL_BYTES = 1 << 20  # a larger buffer is copied again only if its version has changed


class BufferCopies:
    """Takes copies of modules' buffers. A large buffer that did not change between two copies is kept once.

    Args:
        modules: the modules whose buffers are copied. The buffers that exist now are copied, even if another tensor
            takes the place of one.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        modules = list(modules)
        self._places: list[tuple[Key, torch.nn.Module, str]] = []
        self._at_first = {  # shared ones in all their places
            (id(part), attribute)
            for module in modules
            for part in module.modules()
            for attribute, buffer in part._buffers.items()
            if buffer is not None
        }
        for index, module in enumerate(modules):
            owners = dict(module.named_modules(remove_duplicate=False))
            for name, _ in module.named_buffers():
                owner, _, attribute = name.rpartition(".")
                self._places.append((("model", index, name), owners[owner], attribute))
        self._last: dict[Key, tuple[torch.Tensor, int, torch.Tensor]] = {}  # the buffer, its version, its copy
        self._marks: list[tuple[torch.Tensor, int]] = []  # each buffer that is present, and its version

    def present(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """Yield the buffers, by key, of those that existed at the beginning."""
        for key, owner, attribute in self._places:
            buffer = owner._buffers.get(attribute)
            if buffer is not None:
                yield key, buffer

    def mark(self) -> None:
        """Note the buffers as they are now."""
        self._marks = [(buffer, _version_of(buffer)) for _, buffer in self.present()]

    def written(self) -> list[Key]:
        """Return the keys of the buffers that are other tensors, or were written to, since :meth:`mark`."""
        return [
            key
            for (key, buffer), (seen, version) in zip(self.present(), self._marks)
            if buffer is not seen or _version_of(buffer) != version
        ]

    def new(self, modules: Iterable[torch.nn.Module]) -> list[str]:
        """Return the names of the buffers of ``modules`` that are saved and did not exist at the beginning."""
        return [
            f"{name}.{attribute}".lstrip(".")
            for module in modules
            for name, part in module.named_modules()
            for attribute, buffer in part._buffers.items()
            if buffer is not None
            and (id(part), attribute) not in self._at_first
            and attribute not in part._non_persistent_buffers_set
        ]

    def take(self) -> Mapping[Key, torch.Tensor]:
        """Return copies of all buffers, in the order of the modules."""
        copies: dict[Key, torch.Tensor] = {}
        if not self._places:
            return copies
        with torch.no_grad():
            for key, owner, attribute in self._places:
                buffer = owner._buffers.get(attribute)
                if buffer is None:
                    continue
                seen, version, copy = self._last.get(key, (None, -1, buffer))
                part = local_part(buffer)
                now = _version_of(buffer)
                if seen is not buffer or version != now or buffer.is_inference() or part.nbytes <= _SMALL_BYTES:
                    copy = part.detach().clone()
                    self._last[key] = (buffer, now, copy)
                copies[key] = copy
        return copies

    def shape(self, forms: Mapping[Key, tuple[Sequence[int], torch.dtype]]) -> None:
        """Replace the buffers that have another shape or dtype than ``forms`` say: a step may do so, too.

        So is one that a validation has made in torch's inference mode: nothing else may write to it.
        """
        for key, owner, attribute in self._places:
            buffer = owner._buffers.get(attribute)
            if buffer is None or key not in forms or is_sharded(buffer):
                continue
            shape, dtype = forms[key]
            if (tuple(buffer.shape), buffer.dtype) != (tuple(shape), dtype) or buffer.is_inference():
                owner._buffers[attribute] = torch.empty(tuple(shape), dtype=dtype, device=buffer.device)

    def put(self, copies: Mapping[Key, torch.Tensor]) -> None:
        """Give the buffers that still exist the values of ``copies``, and their shapes."""
        self.shape({key: (tuple(copy.shape), copy.dtype) for key, copy in copies.items()})
        with torch.no_grad():
            for key, owner, attribute in self._places:
                buffer = owner._buffers.get(attribute)
                if buffer is not None and key in copies:
                    local_part(buffer).copy_(copies[key])


def _version_of(buffer: torch.Tensor) -> int:
    """Return how often ``buffer`` was written to, as torch counts it; it does not for inference tensors."""
    return 0 if buffer.is_inference() else buffer._version
