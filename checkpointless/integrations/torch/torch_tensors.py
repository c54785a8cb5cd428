"""The tensors of modules and of optimizers of torch's kind, with the replicas that follow from their meshes."""

from __future__ import annotations

import inspect
import itertools
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from checkpointless.inprocess import UnrecoverableError
from checkpointless.inprocess.communicators.process_groups import process_groups
from checkpointless.integrations.compat.precision import unabortable, unsupported_in_a_loop
from checkpointless.state.module_tensors import TrainingTensors, is_sharded, own_state_of
from checkpointless.state.port import PARAMETER
from checkpointless.state.rng import RngStates
from checkpointless.state.serialization import state_tree
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key

#: TransformerEngine's modules save FP8's scales so, in a pickle; FP8 is refused in loops of one's own.
_SAVES_NOTHING = "transformer_engine"
_COMMUNICATES = (
    "an optimizer communicates in its step (torch.optim.Muon does with DTensors, and any does whose gradients are "
    "still to be reduced over tensor-parallel ranks), so that a fault in an update would find ranks on both sides "
    "of it: reduce gradients before the update, or use another optimizer"
)
_SCALES = (
    "an optimizer has a GradScaler of its own (Accelerate's have one in fp16), which no recovery would bring back: "
    "train in bf16"
)
_NEEDS_CLOSURE = (
    "computes gradients several times in one step, between changes of the weights, so that its update cannot be "
    "guarded: use an optimizer that makes one update from one gradient"
)
_FREED = (
    "the parameter {} is trained now and had requires_grad=False when DistributedDataParallel was made, which does "
    "not reduce its gradients: let it be trained when it is wrapped, and freeze it behind that"
)
_FROZEN_SHARD = (
    "requires_grad of the parameter {} was changed behind fully_shard, which looks at it once: change it before"
)
_DRAWS = (
    "an optimizer draws random numbers in its step (or a hook of it does), which could not be drawn again for a "
    "rank that is lost in it: draw them before the update (noise can be added to gradients there)"
)
_NO_PARAMETER = (
    "{} keeps state under {!r}, which is no parameter of it: keep it in a param group, whose values are kept, or "
    "register it (checkpointless.register_optimizer_state)"
)
_OWN_STATE_DICT = (
    "{} keeps {} in its state_dict next to param groups and the state of parameters, which no recovery would bring "
    "back: keep it in a param group, whose values are kept, or register it "
    "(checkpointless.register_optimizer_state)"
)
_AVERAGES = (
    "an optimizer averages parameters over ranks in some of its steps (PostLocalSGDOptimizer), and ranks differ in "
    "between: let DistributedDataParallel reduce the gradients of every step"
)
_NEW_BUFFER = (
    "the first step has registered the buffer {}, which no rank that is made anew has: register it with its first "
    "value when the module is made, or with persistent=False if it follows from nothing that training changes"
)
_requires_grad = operator.attrgetter("requires_grad")


class TorchTensors(TrainingTensors):
    """Modules and torch optimizers of one rank; ``is_known``: the job's first update has shown what these do.

    ``group``: the ranks that hold the same. Default: what the meshes of DTensors say, else all ranks.
    """

    # A mesh does not tell whether a gradient is reduced along a dimension of replicas. FSDP2 does so with its
    # replicas; ranks that are tensor parallel by a plan compute the gradient of what they have in common (the bias
    # after a row-wise division), each for itself.
    are_reduced = False

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        is_known: bool,
        group: Sequence[int] | None = None,
    ) -> None:
        modules = list(modules)
        parts = [part for module in modules for part in module.modules()]
        reason = unsupported_in_a_loop(parts)
        for part in parts:
            reason = reason or unabortable(getattr(part, "config", None))
        for optimizer in optimizers:
            if getattr(optimizer, "scaler", None) is not None:  # Accelerate's, in fp16
                reason = reason or _SCALES
            if getattr(optimizer, "averager", None) is not None:
                reason = reason or _AVERAGES
            closure = inspect.signature(type(optimizer).step).parameters.get("closure")
            needs_closure = closure is not None and closure.default is inspect.Parameter.empty
            if isinstance(optimizer, torch.optim.LBFGS) or needs_closure:
                reason = reason or f"{type(optimizer).__name__} {_NEEDS_CLOSURE}"
        if reason is not None:
            raise UnrecoverableError(reason)
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        sharded: list[Any] = [part for part in parts if isinstance(part, getattr(fsdp, "FSDPModule", ()))]
        for each in sharded:
            each.reshard()  # after a forward pass whole parameters are in the places of shards
        super().__init__(modules, optimizers)
        self._named = {id(module): list(module.named_parameters()) for module in modules}
        self._trained_at_first = list(map(_requires_grad, self._all_parameters))
        self._extra_state = _ExtraState(modules)
        self.optimizers = list(optimizers)
        self.steps: Sequence[Callable[[], object]] = ()  # what makes the update; none: the optimizers' steps
        # Beside later updates threads may communicate.
        self._is_known = is_known
        self._frozen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # by the list of the others
        # A group that the user has given holds for all tensors.
        self._told = tuple(sorted(group)) if group is not None else None
        buffers = [buffer for module in modules for buffer in module.buffers()]
        self._by_mesh = _HoldersByMesh([*self._all_parameters, *buffers], dist.get_rank(), dist.get_world_size())
        self._holders: dict[Key, Group] = {
            ("model", index, name): self._by_mesh.of(tensor)
            for index, module in enumerate(modules)
            for name, tensor in [*self._named[id(module)], *module.named_buffers()]
        }
        self._holders |= {key: self._by_mesh.of(parameter) for key, _, parameter in self._parameters()}
        self._refuse_what_cannot_travel()

    @override
    def parameters_of(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters that the module had when the training began, with their names."""
        return iter(self._named[id(module)])

    @override
    def capture(self) -> Callable[[], dict[str, Any]]:
        """Capture what is no tensor; refuse what was changed in a way that a recovery could not repeat."""
        trained = self.trained()
        if trained != self._trained_at_first:
            self._refuse_what_a_wrapper_overlooks(trained)
        reason = self.grown()
        if reason:
            raise UnrecoverableError(reason)
        captured, extra = super().capture(), self._extra_state.take()
        return (lambda: {**captured(), "extra": extra}) if extra else captured

    def title_of(self, key: Key) -> str:
        """Return what a tensor of an optimizer is, for people."""
        names = {id(each): name for of_module in self._named.values() for name, each in of_module}
        name = next((names.get(id(each), "") for at, _, each in self._parameters() if at == key[:-1]), "")
        parameter = f"the parameter {name or '.'.join(map(str, key[:-1]))}"
        return parameter if key[-1] == PARAMETER else f"{key[-1]} of {parameter}"

    def trained(self) -> list[bool]:
        """Return which parameters are trained now (``requires_grad``), in the order of the modules."""
        return list(map(_requires_grad, self._all_parameters))

    @override
    def restore(self, captured: Mapping[str, Any]) -> None:
        super().restore(captured)
        self._extra_state.put(captured.get("extra", {}))

    def _refuse_what_a_wrapper_overlooks(self, trained: Sequence[bool]) -> None:
        reduced = any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in self.modules)
        names = [name for named in self._named.values() for name, _ in named]
        for name, parameter, at_first, now in zip(names, self._all_parameters, self._trained_at_first, trained):
            if at_first != now and is_sharded(parameter):
                raise UnrecoverableError(_FROZEN_SHARD.format(name))
            if now and not at_first and reduced:
                raise UnrecoverableError(_FREED.format(name))

    @override
    def replica_groups(self, keys: Iterable[Key]) -> Mapping[Group, Sequence[Key]]:
        if self._told is not None:
            return {self._told: list(keys)}
        found: dict[Group, list[Key]] = defaultdict(list)
        for key in keys:
            owner = key[:-1] if key[0] == "optimizer" else key
            found[self._holders.get(owner, self._by_mesh.plain)].append(key)
        return found

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each parameter of the optimizers that has a gradient, and the gradient."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [(each, each.grad) for group in groups for each in group["params"] if each.grad is not None]

    @override
    def finish_update(self) -> None:
        """Make one step of every optimizer, without communication (:meth:`watched`)."""
        with self.watched():
            for step in self.steps or [optimizer.step for optimizer in self.optimizers]:
                step()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the optimizers in the job's first step; ``UnrecoverableError`` if they cannot be guarded."""
        if self._is_known:
            yield
            return
        launched, streams = process_groups.launched(), RngStates.capture()
        yield
        if process_groups.launched() != launched:
            raise UnrecoverableError(_COMMUNICATES)
        if RngStates.capture().streams != streams.streams:
            raise UnrecoverableError(_DRAWS)
        new = self.buffers.new(self.modules)
        if new:
            raise UnrecoverableError(_NEW_BUFFER.format(new[0]))
        self._refuse_what_cannot_travel()
        self._is_known = True

    def _refuse_what_cannot_travel(self) -> None:
        reason = _unfit_hooks(self.modules)
        if reason is not None:
            raise UnrecoverableError(reason)
        reason = self.unfit() or self._extra_state.unfit()
        if reason is not None:
            raise UnrecoverableError(f"no other process could be given this state: {reason}")

    @override
    def unfit(self) -> str | None:
        """Return why something of the optimizers' state cannot be carried over; None: all can be."""
        for optimizer in self.optimizers:
            if own_state_of(optimizer) is not None:
                continue
            known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for key in optimizer.state:
                if id(key) not in known:
                    name = key if isinstance(key, str) else type(key).__name__
                    return _NO_PARAMETER.format(type(optimizer).__name__, name)
            if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
                more = sorted(optimizer.state_dict().keys() - {"state", "param_groups"})
                if more:
                    return _OWN_STATE_DICT.format(type(optimizer).__name__, " and ".join(map(repr, more)))
        return super().unfit()

    @override
    def weights(self) -> Iterator[torch.Tensor]:
        """Return all parameters; those that no optimizer updates come last."""
        trained = self._groups.parameters()
        if trained is not self._frozen[0]:
            known = {id(parameter) for parameter in trained}
            self._frozen = trained, [each for each in self._all_parameters if id(each) not in known]
        return itertools.chain(*self._frozen)

    def arrange(self) -> None:
        """Arrange what torch would arrange in the first step, and keep, in every generation alike. Collective."""
        _settle_buckets(self.modules)


# --- Buckets of DistributedDataParallel, the same in every generation ---------------------------------------------
#
# DDP reduces gradients in buckets. It begins with one bucket and, after the first backward pass, makes others in
# the order in which gradients became ready (``Reducer::rebuild_buckets``,
# torch/csrc/distributed/c10d/reducer.cpp). Where an element lies in a bucket decides in which order an all-reduce
# adds up its parts, and with it the bits of the sum. A job that made DDP anew after a fault would therefore leave
# the path of an undisturbed one. Here the order is given before the first step, in every generation alike: from
# the last parameter to the first, which is about the order in which gradients become ready.


def _settle_buckets(modules: Iterable[torch.nn.Module]) -> None:
    """Give DDP modules their lasting buckets between passes; leave those made or never changed. Collective."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):
                _settle(part)


def _settle(ddp: DistributedDataParallel) -> None:
    if ddp.static_graph:
        raise UnrecoverableError(
            "DistributedDataParallel(static_graph=True) reduces gradients in another order in its first step than "
            "later, so that no recovery could be exact: leave static_graph out"
        )
    if ddp.find_unused_parameters:
        return
    reducer: Any = ddp.reducer
    if reducer._rebuild_buckets():  # a backward pass before the training, as is made in every generation
        return
    parameters = [parameter for parameter in ddp._module_parameters if parameter.requires_grad]
    sparse = {
        id(part.weight)
        for part in ddp.modules()
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
    }
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    with torch.enable_grad():
        chain = torch.zeros((), device=parameters[0].device, requires_grad=True)
        for parameter in parameters:
            chain = _GivesNothing.apply(parameter, chain, id(parameter) in sparse)
    with _without_hooks(parameters):
        chain.backward()
    for parameter in parameters:
        parameter.grad = None  # it may be a part of the buckets, which are given up before there are new ones
    reducer._rebuild_buckets()


class _GivesNothing(torch.autograd.Function):
    """Gives a parameter a gradient of zeros before anything below it in the chain has its own."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, below: torch.Tensor, is_sparse: bool) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        ctx.is_sparse = is_sparse
        return below.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (parameter,) = ctx.saved_tensors
        if not ctx.is_sparse:
            return torch.zeros_like(parameter), grads[0], None
        rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[1:])
        return torch.sparse_coo_tensor(rows, values, parameter.shape), grads[0], None


@contextmanager
def _without_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Keep users' hooks on ``parameters`` from seeing gradients that are none."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    kept = [(parameter, name, getattr(parameter, name)) for parameter in parameters for name in names]
    calls = [(hooks, dict(hooks)) for _, _, hooks in kept if hooks]
    for hooks, _ in calls:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, inner in calls:
            hooks.update(inner)


# --- Extra state of modules ---------------------------------------------------------------------------------------


class _ExtraState:
    """Takes and puts back what modules, and those in them, return from ``get_extra_state``."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        parts = [part for module in modules for part in module.modules()]
        self._saving: list[tuple[int, Any]] = [
            (index, part)
            for index, part in enumerate(parts)
            if type(part).get_extra_state is not torch.nn.Module.get_extra_state
            and not type(part).__module__.startswith(_SAVES_NOTHING)
        ]

    def take(self) -> dict[int, Any]:
        return {index: state_tree.copy(part.get_extra_state()) for index, part in self._saving}

    def put(self, extra: Mapping[int, Any]) -> None:
        for index, part in self._saving:
            if index in extra:
                part.set_extra_state(state_tree.copy(extra[index]))

    def unfit(self) -> str | None:
        """Return why a module's extra state cannot be carried over to another process; None: each can be."""
        for _, part in self._saving:
            try:
                state_tree.check(part.get_extra_state())
            except state_tree.StateTreeError as error:
                return f"{type(part).__name__}.get_extra_state returns what cannot travel ({error})"
        return None


def _unfit_hooks(modules: Iterable[torch.nn.Module]) -> str | None:
    """Return why a communication hook of DDP's cannot be protected; None: there is none that keeps something."""
    for module in modules:
        for hook, state in getattr(module, "_comm_hooks", ()):
            if state is not None and not isinstance(state, torch.distributed.ProcessGroup):
                return (
                    f"the communication hook {getattr(hook, '__name__', hook)} keeps a {type(state).__name__} from "
                    "step to step, which no recovery would bring back: use one without a state "
                    "(fp16_compress_hook, bf16_compress_hook)"
                )
    return None


class _HoldersByMesh:
    """Finds the holders of each tensor of a rank, from the meshes and placements of DTensors.

    A tensor that is no DTensor is held by the ranks that hold all DTensors of this rank (``all``), or else, if only
    this rank does, by all ranks of the meshes: what is not divided over them is the same on all of them.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], rank: int, world_size: int) -> None:
        self._rank = rank
        self._known: dict[tuple[int, Any], Group] = {}  # by the identity of the mesh, and by placements
        spread: list[Any] = [tensor for tensor in tensors if is_sharded(tensor)]
        self._meshes = [each.device_mesh for each in spread]  # whose identities are kept by it
        groups = {self.of(each) for each in spread}
        everybody = range(world_size)
        self.all = tuple(sorted(set(everybody).intersection(*groups)))
        meshes = ({*map(int, mesh.mesh.flatten())} for mesh in {id(each): each for each in self._meshes}.values())
        self.plain = self.all if len(self.all) > 1 else tuple(sorted(set(everybody).intersection(*meshes)))

    def of(self, tensor: torch.Tensor) -> Group:
        """Return the ranks that hold the same as this rank of one tensor, in ascending order."""
        if not is_sharded(tensor):
            return self.plain
        spread: Any = tensor
        placements = tuple(spread.placements)
        name = id(spread.device_mesh), placements
        if name not in self._known:
            self._known[name] = tuple(sorted(_replicas_in(spread.device_mesh, placements, self._rank)))
        return self._known[name]


def _replicas_in(mesh: Any, placements: tuple[Any, ...], rank: int) -> set[int]:
    """Return the ranks of one mesh that hold the same part as ``rank``."""
    ranks: torch.Tensor = mesh.mesh
    places = (ranks == rank).nonzero()
    if len(places) != 1:
        raise ValueError(f"rank {rank} is not in the mesh {ranks.tolist()} of a parameter")
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"a parameter is still to be reduced: its placements are {placements}")
    index = tuple(
        slice(None) if placement.is_replicate() else int(place)
        for placement, place in zip(placements, places[0].tolist(), strict=True)
    )
    return {int(each) for each in ranks[index].flatten().tolist()}
