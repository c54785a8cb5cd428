"""Rebuilds a nested state from JSON nodes and raw memory; trusts nothing that it is told about sizes."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from checkpointless.serialization.plain_values import FACTORIES, FROM_JSON, Tree, made_of
from checkpointless.serialization.tensor_memory import dtype_of, own_device, tensor_bytes
from checkpointless.serialization.tree_encoder import ARRAY_DTYPE

if TYPE_CHECKING:
    from checkpointless.wire.plain import Parsed


class Blobs:
    """Hands out the raw bytes behind the header, in the order in which they were written."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._offset = 0

    def take(self, length: int) -> memoryview:
        """Return the next ``length`` bytes.

        Raises:
            ValueError: there are not that many.
        """
        blob = self._data[self._offset : self._offset + length]
        if length < 0 or len(blob) != length:
            raise ValueError("a state tree is cut off")
        self._offset += length
        return blob

    def end(self) -> None:
        """Check that all bytes were taken.

        Raises:
            ValueError: there are bytes left.
        """
        if self._offset != len(self._data):
            raise ValueError("a state tree has bytes that it does not refer to")


class Decoder:
    """Decodes one tree.

    Args:
        blobs: the bytes that the tree refers to.
        tensors: the tensors that the tree refers to.
    """

    def __init__(self, blobs: Blobs, tensors: Sequence[torch.Tensor]) -> None:
        self._blobs = blobs
        self._tensors = tensors
        self._made: list[Tree] = []  # containers and tensors, in the order in which they were finished

    def decode(self, node: Parsed) -> Tree:
        """Return the value that ``node`` stands for."""
        if isinstance(node, list):
            return self._finished([self.decode(item) for item in node])
        if not isinstance(node, dict):
            return node
        kind, body = node["t"], node.get("v")
        if kind in FROM_JSON:
            return FROM_JSON[kind](body)
        if kind == "bytes":
            return bytes(self._blobs.take(node["v"]))
        if kind == "same":
            if not 0 <= node["v"] < len(self._made):
                raise ValueError("a state tree refers to a missing entry")
            return self._made[node["v"]]
        if kind.startswith("numpy"):
            return _numpy_scalar(kind, node)
        return self._finished(self._compound(kind, node))

    def _finished(self, made: Tree) -> Tree:
        self._made.append(made)
        return made

    def _compound(self, kind: str, node: dict[str, Parsed]) -> Tree:
        if kind == "tensor":
            return self._tensor(node)
        if kind == "array":
            return self._array(node)
        if kind == "bytearray":
            return bytearray(self._blobs.take(node["v"]))
        if kind == "registered":
            return made_of(node["of"], self.decode(node["v"]))
        if kind in ("tuple", "set", "frozenset", "deque"):
            items = [self.decode(item) for item in node["v"]]
            if kind == "deque":
                return deque(items, node["max"])
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
        if kind not in ("dict", "ordered", "counter", "defaultdict"):
            raise ValueError(f"unknown kind {kind!r} in a state tree")
        metadata = self.decode(node["metadata"]) if "metadata" in node else None
        pairs = [(self.decode(key), self.decode(item)) for key, item in node["v"]]
        if kind == "dict":
            return dict(pairs)
        if kind == "ordered":
            ordered: Any = OrderedDict(pairs)
            if metadata is not None:
                ordered._metadata = metadata
            return ordered
        if kind == "counter":
            return Counter(dict(pairs))
        return defaultdict(FACTORIES[node["of"]], pairs)

    def _tensor(self, node: dict[str, Parsed]) -> torch.Tensor:
        dtype, shape, order = dtype_of(node["dtype"]), torch.Size(node["shape"]), node.get("order")
        laid_out = shape if order is None else torch.Size([shape[dim] for dim in order])
        if "at" in node:
            tensor = self._memory(node["at"])
            if tensor.dtype != dtype or tensor.shape != laid_out or tensor.device.type != node.get("device", "cpu"):
                raise ValueError("a state tree refers to another tensor")
        else:
            raw = self._blobs.take(node["v"])
            if min(shape, default=0) < 0 or shape.numel() * dtype.itemsize != len(raw):
                raise ValueError(f"a tensor {tuple(shape)} has {len(raw)} bytes")
            tensor = torch.empty(laid_out, dtype=dtype)
            if raw:
                tensor_bytes(tensor).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
            tensor = tensor.to(own_device(node.get("device", "cpu")))
        if order is not None:
            tensor = tensor.permute(sorted(range(len(order)), key=order.__getitem__))
        if node.get("parameter"):
            return torch.nn.Parameter(tensor, requires_grad=bool(node.get("grad")))
        return tensor.requires_grad_() if node.get("grad") else tensor

    def _array(self, node: dict[str, Parsed]) -> Any:
        import numpy

        flat: Any = (
            self._memory(node["at"]).numpy()
            if "at" in node
            else numpy.frombuffer(bytearray(self._blobs.take(node["v"])), dtype=numpy.uint8)
        )
        shape, turned = tuple(node["shape"]), node.get("order") == "F"
        if any(type(length) is not int or length < 0 for length in shape):
            raise ValueError(f"an array of shape {shape}")
        array = flat.view(_numpy_dtype(node["dtype"])).reshape(shape[::-1] if turned else shape)
        return array.T if turned else array

    def _memory(self, index: int) -> torch.Tensor:
        if type(index) is not int or not 0 <= index < len(self._tensors):
            raise ValueError("a state tree refers to a missing tensor")
        return self._tensors[index]


def _numpy_dtype(text: str) -> Any:
    import numpy

    if not ARRAY_DTYPE.fullmatch(text):
        raise ValueError(f"unknown NumPy dtype {text!r}")
    return numpy.dtype(text)


def _numpy_scalar(kind: str, node: dict[str, Parsed]) -> Any:
    import numpy

    body = node["v"]
    if kind == "numpy_str":
        return numpy.str_(FROM_JSON["str"](body["v"]) if isinstance(body, dict) else body)
    if kind == "numpy_bytes":
        return numpy.bytes_(bytes.fromhex(body))
    if kind != "numpy":
        raise ValueError(f"unknown kind {kind!r} in a state tree")
    return numpy.frombuffer(bytes.fromhex(body), dtype=_numpy_dtype(node["dtype"]))[0]
