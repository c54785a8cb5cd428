"""The tensors of a rank's Megatron model and optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fp8_utils import get_fp8_recipe, is_float8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer
from torch.autograd.graph import increment_version
from typing_extensions import override

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.compat.precision import DELAYED, fp8_recipe
from checkpointless.state.module_tensors import BufferCopies, TrainingTensors
from checkpointless.state.rank_local.state import OWN_BUFFER_BYTES
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key

_META = ("scaling_fwd", "scaling_bwd")
_TENSORS = ("scale", "amax_history")
_PREFIX = "checkpointless_"  # of the buffers' names, which a layer must not have itself
#: Layers with more products than one; each has three scales forward and two backward.
_PRODUCTS = {"LayerNormMLP": 2}
_ATTENTION = "DotProductAttention"  # quantises only with fp8_dot_product_attention, which is refused
_DERIVED = (torch.bfloat16, torch.float16, torch.uint8)  # the last are the bytes of parameters in FP8


class MegatronTensors(TrainingTensors):
    """One rank's model chunks and optimizer, which may be missing; what a distributed optimizer owns is a shard."""

    def __init__(self, chunks: Iterable[torch.nn.Module], optimizer: MegatronOptimizer | None) -> None:
        self.optimizer = optimizer
        self.optimizers = sub_optimizers(optimizer)
        chunks = list(chunks)
        buffers = _Buffers(chunks)  # first: scales are buffers then
        super().__init__(chunks, [getattr(each, "optimizer", None) for each in self.optimizers])
        self.buffers = self._buffers = buffers

    @override
    def replica_groups(self, keys: Iterable[Key]) -> Mapping[Group, Sequence[Key]]:
        """Return ``keys`` by holders: with expert parallelism more ranks hold dense parameters than experts.

        Buffers, and what tensor-parallel ranks have in common, are left to the ranks that hold all.
        """
        distributed = any(isinstance(each, DistributedOptimizer) for each in self.optimizers)
        group, split = replicas(distributed), None if distributed else _dense_and_experts()
        if split is None:
            return {group: list(keys)}
        experts = self._keys_of_experts()
        buffers = {
            ("model", index, name) for index, chunk in enumerate(self.modules) for name, _ in chunk.named_buffers()
        }
        found: dict[Group, list[Key]] = defaultdict(list)
        for key in keys:
            owner = key[:3] if key[0] == "optimizer" else key
            found[group if owner in buffers else split[owner in experts]].append(key)
        return found

    def _keys_of_experts(self) -> set[Key]:
        """Return the keys of what is experts', by what Megatron goes by in its buffers and optimizer groups."""
        keys: set[Key] = {
            ("model", index, name)
            for index, chunk in enumerate(self.modules)
            for name, parameter in self.parameters_of(chunk)
            if not getattr(parameter, "allreduce", True)
        }
        for number, optimizer in enumerate(self._torch_optimizers):
            for position, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
                if group["is_expert_parallel"]:
                    keys.add(("optimizer", number, position))
        return keys

    @override
    def parameters_of(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters of a module that are not kept in FP8, with their names."""
        return ((name, each) for name, each in super().parameters_of(module) if not is_float8tensor(each))

    @override
    def model(self) -> dict[Key, torch.Tensor]:
        self._buffers.follow()
        return super().model()

    @override
    def tensors(self) -> dict[Key, torch.Tensor]:
        """Return model and shard, without what :meth:`rederive` makes: it is neither held twice nor sent."""
        keys = self._keys_of(_derived_parameters(self.optimizers))
        return {key: tensor for key, tensor in super().tensors().items() if key not in keys}

    @override
    def essentials(self) -> dict[Key, torch.Tensor]:
        """Return the shard, and of the model what no gather makes of the shards of all ranks."""
        gathered = self._keys_of(
            parameter
            for optimizer in self.optimizers
            if isinstance(optimizer, DistributedOptimizer)
            for buffer in optimizer.buffers
            for parameter in buffer.params
        )
        model = {key: tensor for key, tensor in self.tensors().items() if key not in gathered}
        return {**model, **self.shard()}

    def _keys_of(self, parameters: Iterable[torch.nn.Parameter]) -> set[Key]:
        meant = {id(parameter) for parameter in parameters}
        return {
            ("model", index, name)
            for index, chunk in enumerate(self.modules)
            for name, parameter in self.parameters_of(chunk)
            if id(parameter) in meant
        }

    @override
    def capture(self) -> Callable[[], dict[str, Any]]:
        """Capture what is no tensor, loss scalers included; refuse other parameters than at the beginning."""
        reason = self.grown()
        if reason:
            raise UnrecoverableError(reason)
        captured, scalers = super().capture(), self._scaler_states()
        return lambda: {**captured(), "scalers": scalers}

    @override
    def restore(self, captured: Mapping[str, Any]) -> None:
        super().restore(captured)
        for optimizer, scaler in zip(self.optimizers, captured.get("scalers", ())):
            if scaler is not None:
                optimizer.grad_scaler.load_state_dict(scaler)

    def _scaler_states(self) -> list[dict[str, Any] | None]:
        """Return a copy of every optimizer's loss-scaler state; None for an optimizer without a loss scaler."""
        return [
            {name: _copy(value) for name, value in scaler.state_dict().items()}
            if (scaler := getattr(optimizer, "grad_scaler", None)) is not None
            else None
            for optimizer in self.optimizers
        ]

    @torch.no_grad()
    def apply(self) -> bool:
        """Apply the final gradients to this rank's shards, without communication; return whether all succeeded."""
        succeeded = True
        for optimizer in self.optimizers:
            if isinstance(optimizer, DistributedOptimizer):
                with _left_as_they_are(optimizer):
                    succeeded &= bool(MixedPrecisionOptimizer.step_with_ready_grads(optimizer))
            else:
                succeeded &= bool(type(optimizer).step_with_ready_grads(optimizer))
        return succeeded

    @override
    def finish_update(self) -> None:
        self.apply()

    @torch.no_grad()
    def gather(self, *, late: bool | None = None) -> None:
        """Gather shards into parameters; ``late`` (not): only what ``overlap_param_gather`` defers. Collective."""
        if not late:
            _quantize(self.optimizers)
        chunks: list[Any] = []
        for optimizer in self.optimizers:
            if isinstance(optimizer, DistributedOptimizer) and late in (
                None,
                optimizer.ddp_config.overlap_param_gather,
            ):
                chunks += [chunk for chunk in optimizer.model_chunks if not any(chunk is each for each in chunks)]
        for chunk in chunks:
            chunk.start_param_sync(force_sync=late is not False)

    @override
    def rederive(self, first: bool = False) -> None:
        """Derive the model's parameters from all ranks' shards, those in FP8 before the first step, too.

        Megatron has quantised values, drawn or loaded, of which a recovery in the first step could not make the
        same bytes. Collective.
        """
        if first and not fp8_parameters(self.modules):
            return
        with torch.no_grad():
            for optimizer in self.optimizers:
                if isinstance(optimizer, MixedPrecisionOptimizer) and not optimizer.is_stub_optimizer:
                    with _left_as_they_are(optimizer):
                        optimizer._copy_main_params_to_model_params()
        self.gather()


def sub_optimizers(optimizer: MegatronOptimizer | None) -> list[Any]:
    """Return the optimizers chained in ``optimizer``, or a list of ``optimizer`` alone."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _derived_parameters(optimizers: Iterable[Any]) -> list[torch.nn.Parameter]:
    """Return the parameters in 16 or 8 bits that each step recomputes from main ones (precision-aware: none)."""
    derived: list[torch.nn.Parameter] = []
    for optimizer in optimizers:
        if not isinstance(optimizer, MixedPrecisionOptimizer) or optimizer.is_stub_optimizer:
            continue
        if getattr(optimizer.config, "use_precision_aware_optimizer", False):
            continue
        if isinstance(optimizer, DistributedOptimizer):
            for buffer in optimizer.buffers:
                if buffer.param_dtype in _DERIVED:
                    derived += buffer.params
        else:
            derived += [each for group in getattr(optimizer, "float16_groups", []) for each in group]
    return derived


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


# --- Parameters that Megatron keeps in FP8 (``fp8_param_gather``) -------------------------------------------------
#
# Such a parameter is a tensor of TransformerEngine's that has no storage of its own: it shows 16 bits, and keeps
# bytes and scales side by side. It is never held or sent. Like a 16-bit parameter it is derived from the main
# parameters of all ranks, to the same bits: quantising depends on them, and with delayed scaling on the scales.
#
# Megatron quantises inside the update, but agrees with the other ranks on the largest values meanwhile. Under the
# lock of an update a rank must not wait for another one. So quantising is separated from the update, and is done
# before the gather.

# What Megatron-core 0.15 and 0.16 ask for the parameters to quantise; while it is replaced, there are none.
COLLECT = "_get_fp8_params_and_shard_fp32_from_fp8"


def fp8_parameters(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Return the parameters of ``modules`` that are kept in FP8."""
    return [parameter for module in modules for parameter in module.parameters() if is_float8tensor(parameter)]


def _is_quantized(optimizer: object) -> bool:
    return (
        isinstance(optimizer, DistributedOptimizer)
        and not optimizer.is_stub_optimizer
        and any(buffer.param_dtype is torch.uint8 for buffer in optimizer.buffers)
    )


@contextmanager
def _left_as_they_are(optimizer: DistributedOptimizer) -> Iterator[None]:
    """Keep an optimizer from quantising, which needs all ranks, while it copies main parameters to the model."""
    if not _is_quantized(optimizer):
        yield
        return
    setattr(optimizer, COLLECT, lambda: ([], [], []))
    try:
        yield
    finally:
        delattr(optimizer, COLLECT)


def _quantize(optimizers: Sequence[object]) -> None:
    """Quantise all ranks' main parameters into those in FP8, and copy those in 16 bits; repeatable. Collective."""
    for optimizer in optimizers:
        if _is_quantized(optimizer):
            assert isinstance(optimizer, DistributedOptimizer)
            optimizer._copy_main_params_to_model_params()


# --- Scales of FP8 training, which TransformerEngine's layers keep beside their parameters ------------------------
#
# With delayed scaling a layer quantises by scales that follow from the largest values of earlier steps. It keeps
# both in objects of its own, where no ``state_dict`` and no list of buffers shows them; a checkpoint has them as
# pickled extra state. Here they become buffers of their layer, in the same memory, so that they are taken back,
# sent and compared like any other buffer, and nothing is unpickled. The other recipes compute scales from the
# tensor at hand and keep nothing.
#
# What is used of a layer (``TransformerEngineBaseModule`` of TransformerEngine 2.0 to 2.20): ``fp8_meta`` and
# ``init_fp8_meta_tensors``. A layer changes scales and histories in place, and keeps those that it has if it is
# initialised again with the same recipe.


class _Buffers(BufferCopies):
    """Takes copies of buffers, among which are the scales of layers from now on. Checkpoints do not get them."""

    def __init__(self, chunks: Iterable[torch.nn.Module]) -> None:
        self._layers: list[Any] = []
        chunks = list(chunks)
        for chunk in chunks:
            config = getattr(chunk, "config", None)
            if getattr(config, "fp8", None) and fp8_recipe(config) == DELAYED:
                self._layers += [layer for name, layer in chunk.named_modules() if _begin(name, layer, config)]
        self.follow()
        nbytes = sum(tensor.nbytes for layer in self._layers for _, tensor in _tensors(layer))
        if nbytes > OWN_BUFFER_BYTES:  # a validation leaves each rank with largest values of its own
            raise UnrecoverableError(
                f"checkpointless keeps at most {OWN_BUFFER_BYTES >> 20} MiB of FP8 histories for each rank, and "
                f"they take {nbytes >> 20} MiB: set fp8_amax_history_len to less"
            )
        super().__init__(chunks)

    @override
    def take(self) -> Mapping[Key, torch.Tensor]:
        self.follow()
        return super().take()

    def follow(self) -> None:
        """Take the scales that the layers use now: a checkpoint may bring a history of another length."""
        for layer in self._layers:
            for name, tensor in _tensors(layer):
                if layer._buffers.get(name) is not tensor:
                    layer.register_buffer(name, tensor, persistent=False)
                increment_version(tensor)  # TransformerEngine's kernels write where torch does not see it


def _begin(name: str, layer: Any, config: Any) -> bool:
    """Have a layer make its scales, as its first forward pass does it; return whether it has any."""
    if not isinstance(getattr(layer, "fp8_meta", None), dict) or _is_a(layer, _ATTENTION):
        return False
    recipe = get_fp8_recipe(config)
    # With the last two, a checkpoint that is made before the first forward pass has the scales.
    layer.fp8_meta |= {"num_gemms": _products(layer), "recipe": recipe, "fp8_checkpoint": True}
    try:
        layer.init_fp8_meta_tensors(recipe)
        found = {name for name, _ in _tensors(layer)}
    except (AttributeError, KeyError, TypeError) as error:
        found, reason = set(), f": {type(error).__name__}: {error}"
    else:
        reason = f": it has {', '.join(sorted(found)) or 'none'}"
    if not found >= {f"{_PREFIX}{meta}_{tensor}" for meta in _META for tensor in _TENSORS}:
        raise UnrecoverableError(
            f"checkpointless does not know the FP8 scales of {name} ({type(layer).__name__}){reason}: set fp8=None"
        )
    return True


def _tensors(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for meta in _META:
        for name in _TENSORS:
            tensor = getattr(layer.fp8_meta.get(meta), name, None)
            if isinstance(tensor, torch.Tensor):
                yield f"{_PREFIX}{meta}_{name}", tensor


def _products(layer: Any) -> int:
    found = getattr(layer, "num_gemms", None)
    if isinstance(found, int):
        return found
    return next((number for name, number in _PRODUCTS.items() if _is_a(layer, name)), 1)


def _is_a(layer: Any, name: str) -> bool:
    """Return whether a layer is of a class of this name, which may not be imported here."""
    return any(base.__name__ == name for base in type(layer).__mro__)


# --- Find the ranks that hold the same shard of model and optimizer state -----------------------------------------


def replicas(distributed_optimizer: bool) -> tuple[int, ...]:
    """Return the ranks, ascending, that hold all of this one's: across optimizer instances, or data-parallel."""
    if distributed_optimizer:
        group = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
        if group is None:
            return (dist.get_rank(),)
        return tuple(sorted(dist.get_process_group_ranks(group)))
    both = _dense_and_experts()
    if both is None:
        return _members(parallel_state.get_data_parallel_group(with_context_parallel=True))
    dense, experts = both
    return tuple(sorted({*dense} & {*experts}))


def _dense_and_experts() -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the holders of this rank's dense parameters and of its experts; None if they are the same."""
    if parallel_state.get_expert_model_parallel_world_size() == 1:
        return None
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return _members(dense), _members(parallel_state.get_expert_data_parallel_group())


def _members(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))
