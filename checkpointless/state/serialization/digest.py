"""Digests of tensors (for any dtype, computed where the tensor is), of modules and of any value."""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy
import torch
import xxhash

from checkpointless.state.serialization.tensor_memory import dtype_name, is_on_host, local_part, tensor_bytes

# --- The digest of bytes on a device: computed there, with nothing copied to the host but its 8 bytes -------------

CHUNK_LANES = 1 << 22  # 32 MiB at a time; the intermediate results of torch's operations take four times as much
_LANE_BYTES = 8
_GOLDEN = -7046029254386353131  # 2**64 divided by the golden ratio, odd, as a signed number
# The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): shifts and
# multipliers, as signed numbers. A weaker mix lets the sign bits of two floats in two lanes cancel out.
_FINALIZER = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))
_WORD = (1 << 64) - 1
_weights: dict[tuple[torch.device, int], torch.Tensor] = {}


def _digest_on_device(flat: torch.Tensor) -> torch.Tensor:
    """Return the 64-bit digest of a flat uint8 tensor, a signed int64 on its device, which is not waited for.

    It sums a bijective mix of each 8-byte lane with a weight of its position. A change of one lane always changes
    it; an exchange of two does unless they are equal or their mixes collide.
    """
    whole = flat.numel() // _LANE_BYTES * _LANE_BYTES
    body, tail = flat[:whole], flat[whole:]
    total = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    if tail.numel():
        padded = torch.zeros(_LANE_BYTES, dtype=torch.uint8, device=flat.device)
        padded[: tail.numel()] = tail
        total += _weighed_sum(-1, padded.view(torch.int64))
    if whole:
        if body.storage_offset() % _LANE_BYTES or body.data_ptr() % _LANE_BYTES:
            body = body.clone()
        lanes = body.view(torch.int64)
        for number, start in enumerate(range(0, lanes.numel(), CHUNK_LANES)):
            total += _weighed_sum(number, lanes[start : start + CHUNK_LANES])
    return total


def _weighed_sum(number: int, lanes: torch.Tensor) -> torch.Tensor:
    """Return what the chunk of that number adds to the digest: the sum of its mixed lanes, weighed; int64."""
    mixed = lanes + _positions(lanes.device, CHUNK_LANES)[: lanes.numel()]
    for shift, factor in _FINALIZER:
        shifted = (mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # a logical shift: no sign bits
        mixed = mixed.bitwise_xor_(shifted)
        if factor != 1:
            mixed = mixed.mul_(factor)
    return mixed.sum() * (2 * number + 5)


def _positions(device: torch.device, chunk_lanes: int) -> torch.Tensor:
    """Return one weight per lane of a chunk: int64, shape ``(chunk_lanes,)``."""
    name = (device, chunk_lanes)
    if name not in _weights:
        _weights[name] = torch.arange(1, chunk_lanes + 1, dtype=torch.int64, device=device) * _GOLDEN
    return _weights[name]


_PLAIN = (bool, int, float, complex, bytes, type(None))
_ITERATORS_FROM = 3  # the index in what `__reduce_ex__` returns where the iterators of list and mapping items begin


_SAMPLED = 16  # elements at the beginning of a tensor, and as many from its middle on


class PendingDigests:
    """Collects digests in order: of host bytes at once, else launched on the device, not comparable with those."""

    def __init__(self) -> None:
        self._digests: list[int | torch.Tensor] = []

    def add(self, flat: torch.Tensor) -> None:
        """Digest a flat uint8 tensor, which may be changed by whatever is launched afterwards."""
        if is_on_host(flat):
            self._digests.append(xxhash.xxh3_64_intdigest(flat.numpy().data))
        else:
            self._digests.append(_digest_on_device(flat))

    def add_parts(self, parts: Iterable[torch.Tensor]) -> None:
        """Digest parts on the host, flat uint8 tensors, as if they lay end to end."""
        total = xxhash.xxh3_64()
        for part in parts:
            total.update(part.cpu().numpy().data)
        self._digests.append(total.intdigest())

    def fetch(self) -> list[int]:
        found: list[int] = []
        waiting = [each for each in self._digests if isinstance(each, torch.Tensor)]
        by_device = {
            device: [each for each in waiting if each.device == device]
            for device in {each.device for each in waiting}
        }
        fetched = {device: iter(torch.stack(each).tolist()) for device, each in by_device.items()}  # waits for it
        for digest in self._digests:
            found.append(next(fetched[digest.device]) & _WORD if isinstance(digest, torch.Tensor) else digest)
        return found


def digest_each(tensors: Mapping[Any, torch.Tensor]) -> dict[Any, int]:
    """Return each tensor's digest by its key, to find out which tensors differ."""
    pending = PendingDigests()
    for tensor in tensors.values():
        pending.add(tensor_bytes(tensor))
    return dict(zip(tensors, pending.fetch(), strict=True))


def digest_parameters(modules: Iterable[torch.nn.Module]) -> str:
    """Return the xxh3-128 (hex) of names and bytes of all parameters (DTensor: this rank's part; FP8: values)."""
    return _digest_named(
        (name, parameter.dequantize() if hasattr(parameter, "_quantizer") else parameter)
        for module in modules
        for name, parameter in module.named_parameters()
    )


def digest_buffers(modules: Iterable[torch.nn.Module]) -> str:
    """Return the xxh3-128 (hex) of names and bytes of all buffers, also those that a ``state_dict`` leaves out."""
    return _digest_named(named for module in modules for named in module.named_buffers())


def _digest_named(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor_bytes(local_part(tensor)).cpu().numpy().data)
    return digest.hexdigest()


class MemoryChecksumManager:
    """Computes digests of a rank's tensors; ``enabled``: replicas of every shard are compared before a recovery."""

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled

    def digest(self, tensor: torch.Tensor) -> int:
        """Return the 64-bit digest of one tensor's bytes: xxh3-64 on the CPU, another one elsewhere."""
        return digest_each({0: tensor})[0]

    def digest_all(self, tensors: Mapping[tuple, torch.Tensor]) -> str:
        """Return one digest (128 bits, hex) over keys, dtypes, shapes and bytes, in the mapping's order."""
        on_devices = PendingDigests()
        for tensor in tensors.values():
            if not is_on_host(tensor):
                on_devices.add(tensor_bytes(tensor))
        digests = iter(on_devices.fetch())
        total = xxhash.xxh3_128()
        for key, tensor in tensors.items():
            total.update(f"{key}|{dtype_name(tensor.dtype)}|{tuple(tensor.shape)}|".encode())
            if is_on_host(tensor):
                total.update(tensor_bytes(tensor).numpy().data)
            else:
                total.update(next(digests).to_bytes(8, "little"))
        return total.hexdigest()


def digest_value(value: object) -> str:
    """Return the digest of any value (xxh3-128, hex), the same in every process that holds an equal value.

    The order of a mapping or a set does not count, nor its type, nor list or tuple. Of an absolute path only the
    last name counts. An object counts by class and what it would be copied from, or, if it cannot be copied, by
    class alone.
    """
    return _digest(value, ()).hex()


def _digest(value: Any, within: tuple[int, ...]) -> bytes:
    if isinstance(value, torch.Tensor):
        head = f"tensor|{dtype_name(value.dtype)}|{tuple(value.shape)}"
        return _join(head, [tensor_bytes(value).cpu().numpy().tobytes()])
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return _join(f"array|{value.dtype.str}|{value.shape}", [value.tobytes()])
    for kind in _PLAIN:
        if isinstance(value, kind):
            return _join(f"{kind.__name__}|{_exact(value)}", [])
    if isinstance(value, str | os.PathLike):
        text = os.fsdecode(value)
        name = os.path.basename(text) if os.path.isabs(text) else text
        return _join("text", [name.encode("utf-8", "surrogatepass")])
    if id(value) in within:
        return _join("itself", [str(len(within) - within.index(id(value))).encode()])
    return _digest_parts(value, (*within, id(value)))


def _exact(value: Any) -> str:
    """Return the text of a plain value, also for an instance of a subclass (NumPy's numbers, for instance)."""
    if isinstance(value, float):
        return value.hex()
    return int.__repr__(value) if isinstance(value, int) else repr(value)


def _digest_parts(value: Any, within: tuple[int, ...]) -> bytes:
    """Return the digest of a value, made from the digests of its parts."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Mapping):
        pairs = (_digest(key, within) + _digest(item, within) for key, item in value.items())
        return _join("mapping", sorted(pairs))
    if isinstance(value, Set):
        return _join("set", sorted(_digest(item, within) for item in value))
    if isinstance(value, list | tuple | numpy.ndarray):
        return _join("sequence", [_digest(item, within) for item in value])
    if inspect.isclass(value) or inspect.isroutine(value):
        return _join("code", [str(getattr(value, "__qualname__", name)).encode()])
    try:
        made_of = value.__reduce_ex__(2)
    except Exception:  # noqa: BLE001 - a class may refuse to be copied with any error; then only its name is known
        return _join(f"opaque|{name}", [])
    if isinstance(made_of, str):
        return _join(f"global|{made_of}", [])
    parts = [
        list(part) if index >= _ITERATORS_FROM and part is not None else part
        for index, part in enumerate(made_of)
        if index > 0
    ]
    return _join(f"object|{name}", [_digest(part, within) for part in parts])


def _join(head: str, parts: list[bytes]) -> bytes:
    """Return the digest of a head and parts, each with its length, so that no two sequences look alike."""
    total = xxhash.xxh3_128()
    for part in (head.encode(), *parts):
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.digest()


def samples(tensors: Mapping[Any, torch.Tensor]) -> dict[Any, bytes]:
    """Return a few bytes of each of ``tensors`` with plain storage, to show cheaply that others took its place."""
    by_device: dict[torch.device, list[tuple[Any, torch.Tensor]]] = defaultdict(list)
    for key, tensor in tensors.items():
        if tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized) and tensor.numel():
            by_device[tensor.device].append((key, _sample(tensor.detach())))
    found: dict[Any, bytes] = {}
    for taken in by_device.values():
        together = torch.cat([sample for _, sample in taken]).cpu().numpy().tobytes()
        place = 0
        for key, sample in taken:
            found[key] = together[place : place + sample.numel()]
            place += sample.numel()
    return found


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    begin = tensor.storage_offset()
    count = min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.itemsize - begin)  # it may be expanded
    starts = (0, count // 2) if count > 2 * _SAMPLED else (0,)
    size = min(count, 2 * _SAMPLED) // len(starts)
    return torch.cat([tensor.as_strided((size,), (1,), begin + start).view(torch.uint8) for start in starts])
