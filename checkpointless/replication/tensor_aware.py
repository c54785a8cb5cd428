"""States that know their tensors, as frameworks hand them to a manager of local checkpoints.

The interface is that of nvidia-resiliency-ext (``TensorAwareStateDict``, ``BasicTensorAwareStateDict``), whose
classes, and Megatron-core's, are taken as well. The *form* of a class says how its states are taken apart and put
together; a class is never imported by a name from a file or a peer.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checkpointless.replication.parts import Content
from checkpointless.state.serialization.state_tree import StateTreeError, Tree


class TensorAwareStateDict(ABC):
    """The state of one rank, from which the tensors can be taken out and into which they can be put back.

    While the tensors are out, the state is *hollow*.
    """

    @property
    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors, always in the same order; the state must not be hollow."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """Whether the tensors are out."""

    @abstractmethod
    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Take the tensors out, and return them."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put as many tensors as were taken out in their places, in that order."""

    @abstractmethod
    def init_tensors(self) -> None:
        """Put new tensors of the same shapes, dtypes and devices in the places of those taken out."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Put copies in host memory in the places of the tensors, and remember on which devices these were."""

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors to the devices on which they were."""


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor that is out."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """A nested state as it is: dicts, lists and tuples of plain values and tensors on any device.

    What needs the tensors while they are out raises a ``RuntimeError``, and so does putting them in twice. Dicts
    and lists are changed in place when tensors are taken out, put in or moved.
    """

    def __init__(self, state_dict: Tree) -> None:
        self.state_dict = state_dict
        self._is_hollow = False
        self._devices: list[torch.device] | None = None  # where the tensors were before they were copied

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        self._require(hollow=False)
        return iter(self._leaves(torch.Tensor))

    @property
    def is_hollow(self) -> bool:
        return self._is_hollow

    def pop_tensors(self) -> list[torch.Tensor]:
        taken = list(self.tensors)
        self.state_dict = _mapped(
            self.state_dict, torch.Tensor, lambda tensor: _Place(tensor.shape, tensor.dtype, tensor.device)
        )
        self._is_hollow = True
        return taken

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in the places from which they were taken; another number is a ``ValueError``."""
        self._require(hollow=True)
        given, places = list(tensor_data), self._leaves(_Place)
        if len(given) != len(places):
            raise ValueError(f"{len(given)} tensors cannot be put in {len(places)} places")
        order = iter(given)
        self.state_dict = _mapped(self.state_dict, _Place, lambda _: next(order))
        self._is_hollow = False

    def init_tensors(self) -> None:
        self._require(hollow=True)
        self.insert_tensors(
            torch.empty(place.shape, dtype=place.dtype, device=place.device) for place in self._leaves(_Place)
        )

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        if self._devices is None:
            self._devices = [tensor.device for tensor in self.tensors]
        self.state_dict = _mapped(
            self.state_dict,
            torch.Tensor,
            lambda tensor: tensor.detach().to("cpu", non_blocking=non_blocking, copy=True),
        )

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        self._require(hollow=False)
        if self._devices is None:
            return
        devices, self._devices = iter(self._devices), None
        self.state_dict = _mapped(
            self.state_dict, torch.Tensor, lambda tensor: tensor.to(next(devices), non_blocking=non_blocking)
        )

    def _leaves(self, kind: type) -> list[Any]:
        return list(_found(self.state_dict, kind))

    def _require(self, *, hollow: bool) -> None:
        if self._is_hollow is not hollow:
            raise RuntimeError(f"the tensors of this state have {'not ' if hollow else ''}been taken out")


# --- forms -------------------------------------------------------------------------------------------------------


#: What takes a state apart, unchanged, into a tree of values and tensors, and what puts it together.
_Form = tuple[Callable[[Any], Tree], Callable[[Tree], Any]]
_FORM = "checkpointless.form"  # the key of a stored state's class
_forms: dict[str, _Form] = {}
#: Classes of others, with the module of ours that registers their form when it is imported.
_KNOWN = {
    "megatron.core.dist_checkpointing.tensor_aware_state_dict.MCoreTensorAwareStateDict": (
        "checkpointless.integrations.megatron.tensor_aware"
    )
}
_NVRX = "nvidia_resiliency_ext.checkpointing.local.basic_state_dict"


def register_form(kind: type, taken_apart: Callable[[Any], Tree], put_together: Callable[[Tree], Any]) -> None:
    """Let states of a tensor-aware class of one's own be stored and replicated.

    Every rank has to register the class, in a module that it imports before the first load.

    Args:
        kind: the class; not its subclasses.
        taken_apart: returns a tree of plain values and tensors (nested dicts, lists and tuples); changes no state.
        put_together: makes a state of the class from such a tree, whose tensors are in host memory.
    """
    _forms[_name(kind)] = taken_apart, put_together


def _is_tensor_aware(state: object) -> bool:
    """Return whether ``state`` has the interface of :class:`TensorAwareStateDict`, whatever its class."""
    return all(hasattr(type(state), name) for name in ("pop_tensors", "insert_tensors", "tensors", "is_hollow"))


def content_of(state: Tree) -> Content:
    """Take a state, or an object's, apart, which keeps its tensors; ``StateTreeError`` if it cannot be stored."""
    if not _is_tensor_aware(state):
        if hasattr(state, "state_dict") and not isinstance(state, (dict, list, tuple)):
            return content_of(state.state_dict() if callable(state.state_dict) else state.state_dict)
        return Content.of(_plain(state))
    name = _name(type(state))
    form = _form(name)
    if form is None:
        raise StateTreeError(f"state is a {name}, which is not known: give it to register_form, on every rank")
    if state.is_hollow:
        raise StateTreeError("state is hollow: put its tensors back first (insert_tensors)")
    return Content.of({_FORM: name, "state": _plain(form[0](state))})


def _plain(value: Any) -> Any:
    """Return a nested state with dicts and tuples in the place of subclasses, which a reader may not have."""
    if isinstance(value, dict):
        items = {key: _plain(item) for key, item in value.items()}
        return OrderedDict(items) if type(value) is OrderedDict else items
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(map(_plain, value))
    return list(map(_plain, value)) if type(value) is list else value


def state_of(content: Content) -> Tree:
    """Return the state of :func:`content_of` in its class; ``ValueError`` if that is not known here."""
    state = content.state()
    if not isinstance(state, dict) or _FORM not in state:
        return state
    form = _form(state[_FORM])
    if form is None:
        raise ValueError(
            f"{state[_FORM]} is not known on this rank: call register_form in a module that it imports"
        )
    return form[1](state["state"])


def _form(name: str) -> _Form | None:
    if name not in _forms and name in _KNOWN:
        importlib.import_module(_KNOWN[name])
    return _forms.get(name)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _mapped(tree: Tree, kind: type, function: Callable[[Any], Any]) -> Tree:
    """Return a nested state with ``function`` applied to each leaf of a kind; dicts and lists stay the same."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, dict):
        tree.update({key: _mapped(value, kind, function) for key, value in tree.items()})
    elif isinstance(tree, list):
        tree[:] = [_mapped(value, kind, function) for value in tree]
    elif isinstance(tree, tuple):
        items = (_mapped(value, kind, function) for value in tree)
        return tree._make(items) if hasattr(tree, "_make") else tuple(items)
    return tree


def _found(tree: Tree, kind: type) -> Iterator[Any]:
    """Yield the leaves of a kind in a nested state, in the order in which :func:`_mapped` comes to them."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _found(value, kind)


def _basic_apart(state: Any) -> Tree:
    devices = getattr(state, "_devices", None) or [tensor.device for tensor in state.tensors]
    return {"state_dict": state.state_dict, "devices": [str(device.type) for device in devices]}


def _basic_together(tree: Tree) -> BasicTensorAwareStateDict:
    made = BasicTensorAwareStateDict(tree["state_dict"])
    made._devices = [_here(kind) for kind in tree["devices"]]
    return made


def _nvrx_together(tree: Tree) -> Any:
    module = importlib.import_module(_NVRX)
    made = object.__new__(module.BasicTensorAwareStateDict)  # whose own constructor refuses tensors in host memory
    made.state_dict, made._is_hollow = tree["state_dict"], False
    return made


def _here(kind: str) -> torch.device:
    if kind == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


register_form(BasicTensorAwareStateDict, _basic_apart, _basic_together)
_forms[f"{_NVRX}.BasicTensorAwareStateDict"] = _basic_apart, _nvrx_together
