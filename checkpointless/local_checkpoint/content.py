"""A state that is saved, as its structure and its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from checkpointless.local_checkpoint import tensor_aware
from checkpointless.serialization import state_tree
from checkpointless.serialization.state_tree import StateTreeError, Tree


@dataclass(frozen=True)
class Content:
    """A nested or tensor-aware state, separated into structure and tensors.

    Attributes:
        structure: the encoding of everything but the tensors.
        tensors: the tensors, in the order in which the structure refers to them.
        form: the name of the class of a tensor-aware state; "": the state is a nested one.
    """

    structure: bytes
    tensors: tuple[torch.Tensor, ...]
    form: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of structure and tensors."""
        return len(self.structure) + sum(tensor.nbytes for tensor in self.tensors)

    @classmethod
    def of(cls, state: Tree) -> Content:
        """Take ``state`` apart, which is not changed; its tensors are referenced, not copied.

        Raises:
            StateTreeError: something in it cannot be stored safely; the message says where it is.
        """
        tensors: list[torch.Tensor] = []
        form = ""
        if tensor_aware.is_tensor_aware(state):
            form = tensor_aware.form_name(state)
            state = tensor_aware.form(form).taken_apart(state)
        skeleton = _without_tensors(state, "state", tensors)
        return cls(state_tree.dumps(skeleton), tuple(tensors), form)

    def state(self) -> Tree:
        """Return the state, put together again, as the class that it was.

        Raises:
            ValueError: structure and tensors do not belong together, or the class is not known on this rank.
        """
        state = _with_tensors(state_tree.loads(self.structure), self.tensors)
        return tensor_aware.form(self.form).put_together(state) if self.form else state

    def on_host(self, copy: bool = False) -> Content:
        """Return this content in host memory.

        Args:
            copy: share nothing with the original, not even tensors that lie in host memory already.
        """
        return replace(self, tensors=tuple(tensor.to("cpu", copy=copy) for tensor in self.tensors))


def _without_tensors(value: Tree, path: str, tensors: list[torch.Tensor]) -> Tree:
    """Return ``value`` with a reference in the place of each tensor.

    A reference is a tuple that ends in "tensor". To tell them apart, "tuple" is appended to each of the user's
    tuples. (The marks are at the end, so that the state tree's messages count the items as the user does.)
    """
    if isinstance(value, torch.Tensor):
        tensors.append(_storable(value, path))
        return len(tensors) - 1, "tensor"
    if isinstance(value, dict):
        return {key: _without_tensors(item, f"{path}[{key!r}]", tensors) for key, item in value.items()}
    if isinstance(value, tuple):
        return *(_without_tensors(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)), "tuple"
    if type(value) is list:
        return [_without_tensors(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)]
    return value


def _with_tensors(value: Tree, tensors: tuple[torch.Tensor, ...]) -> Tree:
    """Put together what :func:`_without_tensors` took apart."""
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    if not isinstance(value, tuple):
        return value
    if value[-1:] == ("tuple",):
        return tuple(_with_tensors(item, tensors) for item in value[:-1])
    if len(value) != 2 or value[1] != "tensor" or type(value[0]) is not int or not 0 <= value[0] < len(tensors):
        raise ValueError("the structure of a state refers to a missing tensor")
    return tensors[value[0]]


def _storable(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """Return ``tensor`` without its autograd history, if it is nothing more than strided memory.

    Of a parameter that TransformerEngine keeps in FP8, it is the values that it stands for, as in Megatron's saves.
    """
    if hasattr(tensor, "_quantizer"):
        tensor = tensor.dequantize()
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        raise StateTreeError(f"{path} is a {kind.__module__}.{kind.__qualname__}: give its local, plain tensor")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise StateTreeError(f"{path} is a tensor without plain memory ({tensor.layout}, {tensor.device})")
    return tensor.detach().resolve_conj().resolve_neg()
