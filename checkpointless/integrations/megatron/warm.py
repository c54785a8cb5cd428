"""A model with its optimizer that stays built over a restart, and is bound to the groups of the next generation."""

from __future__ import annotations

import functools
import logging
import pickle
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import xxhash
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import get_model_config, get_te_version

from checkpointless.inprocess.communicators.launch_bound import LaunchBound
from checkpointless.integrations.megatron.state import fp8_parameters, sub_optimizers
from checkpointless.state.rng import RngStates

# --- Fingerprints of values: what a value is now, to be compared with what another one is later -------------------

_MOST_BYTES = 64 << 20  # what is pickled to more has no fingerprint


def fingerprints(values: Mapping[str, object]) -> dict[str, object]:
    """Return a digest of what each of ``values`` is pickled to: if two are equal, so is what code finds in them.

    A function, module or class that cannot be pickled is equal only to itself. Any other such value, and a function
    that reads variables around it, equals nothing: it may have changed.
    """
    return {name: _fingerprint(value) for name, value in values.items()}


def _fingerprint(value: object) -> object:
    file = _BoundedDigest()
    pickler = pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.fast = True  # else equal values differ if one of them refers to one object twice
    try:
        pickler.dump(value)
    except Exception:  # noqa: BLE001 - any class may refuse in its own way
        is_function = isinstance(value, types.FunctionType) and not value.__closure__
        is_fixed = is_function or isinstance(value, types.ModuleType | type)
        return value if is_fixed else object()
    return file.digest.hexdigest()


def _differing(then: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """Return the first name whose fingerprint differs, in alphabetical order; None: there is none."""
    missing = object()
    return next((name for name in sorted({*then, *now}) if then.get(name, missing) != now.get(name, missing)), None)


class _BoundedDigest:
    """A file that keeps a digest of what is written, up to a size."""

    def __init__(self) -> None:
        self.digest = xxhash.xxh3_128()
        self._size = 0

    def write(self, data: bytes) -> int:
        self._size += len(data)
        if self._size > _MOST_BYTES:
            raise ValueError("it is too large")
        self.digest.update(data)
        return len(data)


#: A process group with its global ranks and its description.
Group = tuple[Any, tuple[int, ...], str]
#: Fingerprints of the values of configurations, by what each describes and by name.
Plans = Mapping[str, Mapping[str, object]]
#: Options with which an interrupted step leaves more behind than is undone here, or a graph that is given up.
_UNKNOWN_REMAINS = (
    "defer_embedding_wgrad_compute",
    "moe_shared_expert_overlap",
    "enable_cuda_graph",
    "external_cuda_graph",
    # TransformerEngine's: what its modules then keep belongs to a step, or to a process group.
    "fp8",
    "fp4",
    "tp_comm_overlap",
    "symmetric_ar_type",
    "delay_wgrad_compute",
    "use_transformer_engine_op_fuser",
    "cpu_offloading",
    "fine_grained_activation_offloading",
)
#: What the guard and the strategy put over an optimizer's own functions.
_COVERED = ("get_grad_norm", "clip_grad_norm", "count_zeros", "prepare_grads", "step_with_ready_grads", "step")


def _groups_now() -> list[Group]:
    """Return the process groups that this rank is in, in the order in which they were made."""
    groups: list[Any] = list(c10d._world.pg_map)
    return [(group, tuple(dist.get_process_group_ranks(group)), str(group.group_desc)) for group in groups]


class KeptModel:
    """A built model and its optimizer, made when they are built, and used after a fault if it still may be.

    ``plans`` are fingerprints of all configurations before anything was built, ``streams`` the random streams
    before and after, ``noted`` what each chunk's configuration was given meanwhile.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: MegatronOptimizer,
        plans: Plans,
        streams: tuple[RngStates, RngStates],
        noted: Sequence[Mapping[str, Any]],
        bound: LaunchBound | None = None,
        saved: Collection[str] = (),
    ) -> None:
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.noted = [dict(each) for each in noted]
        self.bound = bound
        self.saved = frozenset(saved)
        self._plans = plans
        self.streams = streams
        self._built = _Blueprint(self.chunks)
        self._marks = _marks(optimizer)
        self._ties = [_ties_embeddings(chunk) for chunk in self.chunks]  # while it is built
        self._modes = [(module, module.training) for chunk in self.chunks for module in chunk.modules()]
        self._trackers = [get_cuda_rng_tracker()]  # of random streams
        self._generations = [_groups_now()]  # to which references may point: a fault may come while they change

    # --- whether it may be used -----------------------------------------------------------------------------------

    def unfit(self) -> str | None:
        """Return why the model cannot be kept over the fault that has come, in a phrase; None: it can."""
        unknown = _unknown_class(self.chunks)
        if unknown is not None:
            return f"it is not known what {unknown} keeps from step to step"
        if fp8_parameters(self.chunks):
            return "parameters in FP8 are built anew"
        for model in self.chunks:
            config = get_model_config(model)
            on = [name for name in _UNKNOWN_REMAINS if getattr(config, name, False)]
            on += ["cuda_graph_impl"] if getattr(config, "cuda_graph_impl", "none") not in (None, "none") else []
            if on:
                return f"{on[0]} is on"
        if _marks(self.optimizer) != self._marks:
            return "the optimizer has other hooks or functions than when it was built"
        return self._built.difference(self.chunks)

    @property
    def builds_together(self) -> bool:
        """Whether ranks that build this model may exchange more than keys of param groups and tied embeddings."""
        config = get_model_config(self.chunks[0])
        if config.pipeline_model_parallel_size == 1:
            return False
        shares = getattr(config, "share_embeddings_and_output_weights", True)
        known = all(type(_inside(chunk)) is GPTModel for chunk in self.chunks)
        return bool(getattr(config, "mtp_num_layers", None) or (shares and not known))

    def mismatch(self, plans: Plans) -> str | None:
        """Return what a model of these ``plans`` would have otherwise, in a phrase; None: it is the same."""
        for what, then in self._plans.items():
            name = _differing(then, plans.get(what, {}))
            if name is not None:
                return f"{name} of the {what} is another one"
        now = [group[1:] for group in _groups_now()]
        if any([group[1:] for group in then] != now for then in self._generations):
            return "the process groups are laid out otherwise"
        return None

    # --- how it is used -------------------------------------------------------------------------------------------

    def bind(self) -> int:
        """Bind all to this generation's groups, undo a half-made step; return how many references changed."""
        now = _groups_now()
        successors = {
            id(old): new for then in self._generations for (old, *_), (new, *_) in zip(then, now) if old is not new
        }
        tracker = get_cuda_rng_tracker()
        successors |= {id(old): tracker for old in self._trackers if old is not tracker}
        self._generations.append(now)  # before the first is replaced
        self._trackers.append(tracker)
        for name in _COVERED:
            vars(self.optimizer).pop(name, None)
        replaced = _Walk([*self.chunks, self.optimizer, self.noted], successors).replaced
        self._generations, self._trackers = [now], [tracker]
        self._reset()
        return replaced

    def _reset(self) -> None:
        """Undo what a half-made step has left in buckets and modules: each step clears gradients when it begins."""
        for chunk in self.chunks:
            for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
                group.param_gather_handle = group.grad_reduce_handle = None
                group.param_gather_dispatched = False
            for module in chunk.modules():
                if getattr(module, "input_tensor", None) is not None:
                    module.input_tensor = None
                if _is_of_engine(module) and hasattr(module, "is_first_microbatch"):
                    module.is_first_microbatch = True
        for module, training in self._modes:
            module.training = training
        if self.bound is not None:
            self.bound.restart()

    @contextmanager
    def in_place_of_new(self, everywhere: bool) -> Iterator[None]:
        """Have Megatron return the kept optimizer; unless ``everywhere``, join what others exchange."""
        original = megatron_optimizer.get_megatron_optimizer

        def get(config: OptimizerConfig, model_chunks: Sequence[Any], **options: Any) -> MegatronOptimizer:
            if [id(each) for each in model_chunks] != [id(each) for each in self.chunks]:
                return original(config, list(model_chunks), **options)
            if not everywhere:
                self._gather_keys(config, options)
            self._renew(config)
            return self.optimizer

        megatron_optimizer.get_megatron_optimizer = get
        try:
            yield
        finally:
            megatron_optimizer.get_megatron_optimizer = original

    def take_part(self, index: int, dtype: torch.dtype) -> None:
        """Take part in tying embeddings with a stage that builds, which are restored later. Collective."""
        if self._ties[index]:
            weight = _inside(self.chunks[index]).shared_embedding_or_output_weight()
            given = torch.zeros_like(weight, dtype=dtype, requires_grad=False)
            dist.all_reduce(given, group=parallel_state.get_embedding_group())

    def _gather_keys(self, config: OptimizerConfig, options: Mapping[str, Any]) -> None:
        """Gather the keys of param groups with ranks that make an optimizer: of dense and of expert parameters."""
        names = ("no_weight_decay_cond", "scale_lr_cond")
        filters: tuple[tuple[Callable[[Any], bool], str], ...] = (
            (lambda group: not group["is_expert_parallel"], "buffers"),
            (lambda group: bool(group["is_expert_parallel"]), "expert_parallel_buffers"),
        )
        for keep, buffers in filters:
            megatron_optimizer._get_param_groups_and_buffers(
                self.chunks,
                model_chunk_offset=0,
                config=config,
                lr_mult=options.get("lr_mult", 1.0),
                filter_fn=keep,
                buffer_name=buffers,
                **{name: options.get(name) for name in names},
            )

    def _renew(self, config: OptimizerConfig) -> None:
        """Let the optimizer look as it does when it is new: a scheduler is made for it, and takes its values."""
        configs = {id(each.config): each.config for each in [self.optimizer, *sub_optimizers(self.optimizer)]}
        for each in configs.values():
            vars(each).update(vars(config))
        for group in self.optimizer.param_groups:
            group.pop("initial_lr", None)
            group["lr"] = group["pre_mult_lr"] * group.get("pre_lr_mult", 1.0)
            group["weight_decay"] = group["pre_mult_wd"] * group.get("pre_wd_mult", 1.0)


def _inside(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _ties_embeddings(chunk: Any) -> bool:
    """Return whether a stage exchanges its shared weight, as ``setup_embeddings_and_output_layer`` has it."""
    model = _inside(chunk)
    if not getattr(model, "share_embeddings_and_output_weights", False):
        return False
    return bool(get_model_config(chunk).pipeline_model_parallel_size > 1 and model._is_in_embd_group())


def _marks(optimizer: Any) -> list[object]:
    """Return what users may have put on an optimizer: the hooks of each part, and functions of its own."""
    parts = [optimizer, *sub_optimizers(optimizer)]
    parts += [inner for each in parts if (inner := vars(each).get("optimizer")) is not None]
    return [
        (
            _hooks_of(vars(each)),
            sorted(name for name, value in vars(each).items() if callable(value) and name not in _COVERED),
        )
        for each in parts
    ]


def _hooks_of(attributes: Mapping[str, Any]) -> dict[str, int]:
    found = {name: each for name, each in attributes.items() if name.endswith("_hooks") and isinstance(each, dict)}
    return {name: len(hooks) for name, hooks in found.items() if hooks}


# --- Replaces references to what belongs to a generation that is over, in everything that is reachable ----------

#: Objects of these classes refer to no group of a model's; loggers lead to everything that has one.
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    type,
    types.NoneType,
    types.ModuleType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.Generator,
    logging.Logger,
)


class _Walk:
    """Replaces every reference to an old group that can be reached from ``roots``, and methods bound to one.

    Followed are attributes, items, bound methods, partial functions, closures and defaults; not what only C++
    refers to. ``successors`` has what replaces a group, by its ``id``.
    """

    def __init__(self, roots: Iterable[object], successors: Mapping[int, object]) -> None:
        self._successors = successors
        self._seen: dict[int, object] = {}  # the objects, too: their ids must not be given to others meanwhile
        self._due: list[Any] = list(roots)
        self.replaced = 0
        while self._due:
            each = self._due.pop()
            if id(each) not in self._seen:
                self._seen[id(each)] = each
                self._visit(each)

    def _visit(self, each: Any) -> None:
        """Replace the references that one object has, and have what it refers to visited."""
        if isinstance(each, dict):
            self._items(each, list(each.items()))
        elif isinstance(each, list):
            self._items(each, list(enumerate(each)))
        elif isinstance(each, tuple | set | frozenset):
            for value in each:
                self._next(value)
        elif isinstance(each, functools.partial):
            arguments, keywords = self._next(each.args), dict(each.keywords)
            self._items(keywords, list(keywords.items()))
            state: Any = each  # Any: typeshed leaves __setstate__ out
            state.__setstate__((self._next(each.func), arguments, keywords, vars(each) or None))
        elif isinstance(each, types.MethodType):
            self._next(each.__self__)
            self._next(each.__func__)
        elif isinstance(each, types.FunctionType):
            self._function(each)
        else:
            values = getattr(each, "__dict__", None)
            if isinstance(values, dict):
                self._items(values, list(values.items()))
            for name in _slots(type(each)):  # type: ignore[arg-type]  # mypy: a class is hashable
                value = getattr(each, name, None)
                new = self._next(value)
                if new is not value:
                    setattr(each, name, new)

    def _next(self, value: Any) -> Any:
        """Return what is to stand in the place of ``value``; what stays is visited later."""
        kind = type(value)
        if issubclass(kind, _LEAVES):
            return value
        if id(value) in self._successors:
            self.replaced += 1
            return self._successors[id(value)]
        if isinstance(value, tuple):
            made = [self._next(each) for each in value]
            if any(new is not old for new, old in zip(made, value)):
                return kind(*made) if hasattr(value, "_fields") else kind(made)
            return value
        if kind is types.MethodType:  # what it is bound to cannot be replaced in it
            owner = self._next(value.__self__)
            if owner is not value.__self__:
                return types.MethodType(value.__func__, owner)
        if id(value) not in self._seen:
            self._due.append(value)
        return value

    def _items(self, container: Any, items: Iterable[tuple[Any, Any]]) -> None:
        for key, value in items:
            if not issubclass(type(value), _LEAVES):  # most values are
                new = self._next(value)
                if new is not value:
                    container[key] = new

    def _function(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not yet filled
                continue
            new = self._next(value)
            if new is not value:
                cell.cell_contents = new
        if function.__defaults__ is not None:
            function.__defaults__ = self._next(function.__defaults__)
        for values in (function.__kwdefaults__, function.__dict__):
            if values:
                self._items(values, list(values.items()))


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    found: list[str] = []
    for each in kind.__mro__:
        names = each.__dict__.get("__slots__", ())
        found += (names,) if isinstance(names, str) else names
    return tuple(name for name in found if name not in ("__dict__", "__weakref__") and not name.startswith("__"))


# --- What a model looks like as it was built, so that it is noticed if anybody has changed it since -------------

_COMPARED = (bool, int, float, str, torch.dtype)  # None may become a tensor that every step makes anew
_PASSING = frozenset({"training", "current_microbatch"})  # put back, or set anew before it is read

# What a forward pass of TransformerEngine's modules sets before it reads it.
_PASSING_OF_ENGINE = {
    *("activation_dtype", "allow_different_data_and_param_types", "forwarded_at_least_once", "fp8_parameters"),
    *("is_first_microbatch", "attn_mask_type", "align_size"),
    *("input_in_bf16", "input_in_float16", "input_in_fp16"),
}

#: Packages whose modules keep nothing from step to step but parameters and buffers.
_KNOWN = ("megatron.core.", "nemo.", "torch.nn.", "checkpointless.", "builtins.", "abc.", "typing.")
#: Packages of which only modules with these names are known: no whole layers, for example. Without FP8, user
#: buffers and delayed gradients, of which the configuration says, these keep nothing either.
_ENGINE = ("transformer_engine.", "megatron.core.extensions.")
_KNOWN_OF_ENGINE = (
    "megatron.core.extensions.transformer_engine.TE",
    *(f"transformer_engine.pytorch.{each}." for each in ("attention", "module", "ops.basic", "ops.op")),
)
#: The first and the last version of TransformerEngine whose sources were read.
_VERSIONS = ((2, 6), (2, 12))


def _unknown_class(modules: Iterable[torch.nn.Module]) -> str | None:
    """Return the name of a class of which it is not known what it keeps from step to step; None: there is none."""
    for module in modules:
        for each in module.modules():
            for kind in _kinds_of(each):
                if not kind.startswith(_KNOWN_OF_ENGINE if kind.startswith(_ENGINE) else _KNOWN):
                    return kind
            if _is_of_engine(each):
                release = get_te_version().release[:2]
                if not _VERSIONS[0] <= release <= _VERSIONS[1]:
                    return f"TransformerEngine {'.'.join(map(str, release))}"
    return None


def _is_of_engine(module: torch.nn.Module) -> bool:
    return any(kind.startswith(_ENGINE) for kind in _kinds_of(module))


def _kinds_of(module: torch.nn.Module) -> list[str]:
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]


class _Blueprint:
    """The structure of modules as they are now: classes, hooks, parameters, buffers, plain attributes.

    Hooks are counted, plain numbers and words compared, and buffers by shape, which suffices for classes known to
    keep nothing else.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._entries = list(self._look(modules))

    def difference(self, modules: Sequence[torch.nn.Module]) -> str | None:
        """Return what is not as it was in ``modules``, as a phrase; None: nothing."""
        now = list(self._look(modules))
        for then, entry in zip(self._entries, now):
            if then != entry:
                return f"{entry[0]} is not as it was built"
        if len(now) != len(self._entries):
            return f"the model has {len(now)} parts, and had {len(self._entries)}"
        return None

    def _look(self, modules: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
        for index, module in enumerate(modules):
            for name, each in module.named_modules(remove_duplicate=False):
                yield f"{type(each).__name__} {name or index}", self._entry(each)

    def _entry(self, module: torch.nn.Module) -> tuple[Any, ...]:
        values = vars(module)
        names = values.keys() - _PASSING - (_PASSING_OF_ENGINE if _is_of_engine(module) else set())
        return (
            type(module),
            _hooks_of(values),
            {key: values[key] for key in names if isinstance(values[key], _COMPARED)},
            {key: _marks_of(value) for key, value in module._parameters.items() if value is not None},
            {key: value.shape if value is not None else None for key, value in module._buffers.items()},
            sorted(names),
            list(module._modules),
        )


def _marks_of(parameter: torch.Tensor) -> tuple[object, ...]:
    after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return id(parameter), parameter.requires_grad, len(parameter._backward_hooks or {}), len(after)
