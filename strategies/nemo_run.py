"""A NeMo-Run recipe whose objects are made inside the block that is executed again, not before it."""

from __future__ import annotations

import copy
import logging
import operator
import os
from collections.abc import Iterable
from typing import Any

import fiddle as fdl
import nemo_run as run
import yaml
from fiddle.experimental import serialization
from nemo.lightning import AutoResume, MegatronOptimizerModule, MegatronStrategy
from nemo_run.config import register_supported_cast
from typing_extensions import override

from checkpointless.callbacks import CheckpointlessCallback
from checkpointless.inprocess import HPWrapper
from checkpointless.integrations.compat.precision import unabortable, unsupported
from checkpointless.integrations.lightning.checkpoints.auto_resume import CheckpointlessAutoResume
from checkpointless.integrations.megatron import cpu_platform
from checkpointless.strategies.megatron_strategy import CheckpointlessMegatronStrategy
from checkpointless.system.environment import WORLD_SIZE_ENV
from checkpointless.system.layout import Layout

logger = logging.getLogger(__name__)


class _Unbuilt:
    """Holds a recipe so that Fiddle makes no objects of it: Fiddle does not look inside."""

    def __init__(self, recipe: run.Partial) -> None:
        self.recipe = recipe

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unbuilt) and self.recipe == other.recipe

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Unbuilt({self.recipe!r})"


def train(recipe: _Unbuilt, wrapper: HPWrapper | None = None) -> object:
    """Make the objects of a recipe and train it, and do so again in the same process after every fault.

    What was put into the recipe after it was enabled, a strategy for example, is switched on, too.
    """
    if cpu_platform.requested():
        cpu_platform.install()
    plain = copy.deepcopy(recipe.recipe)
    _switch_on(plain)
    return (wrapper or HPWrapper())(_build_and_call)(plain)


def _build_and_call(recipe: run.Partial) -> object:
    """Build and run a recipe: the block that is executed again. Values that are no configurations are copied."""
    return fdl.build(copy.deepcopy(recipe))()


class CheckpointlessRecipe(run.Partial):
    """A recipe that is shown and edited like any other and that, when run, calls :func:`train` with itself unbuilt.

    Fiddle makes a recipe's objects once, before the call; where it takes this one apart, it sees one opaque
    argument.
    """

    @classmethod
    def adopt(cls, recipe: run.Partial, wrapper: run.Config | None) -> CheckpointlessRecipe:
        """Turn ``recipe`` itself into one of these; without ``wrapper`` it keeps the one that it has."""
        object.__setattr__(recipe, "__class__", cls)
        if wrapper is not None or "_wrapper" not in vars(recipe):
            object.__setattr__(recipe, "_wrapper", wrapper)
        assert isinstance(recipe, cls)
        return recipe

    def plain(self) -> run.Partial:
        """Return an ordinary ``run.Partial`` with the same arguments, which NeMo-Run would run without re-entry."""
        return run.Partial.__unflatten__(*super().__flatten__())

    @override
    def visualize(self, **kwargs: Any) -> Any:
        return self.plain().visualize(**kwargs)

    @override
    def diff(self, old: Any, trim: bool = True, **kwargs: Any) -> Any:
        old = old.plain() if isinstance(old, CheckpointlessRecipe) else old
        return self.plain().diff(old, trim=trim, **kwargs)

    @override
    def __flatten__(self) -> tuple[tuple[Any, ...], Any]:
        call = run.Partial(train, bind_args=False, recipe=self._unbuilt(), wrapper=vars(self)["_wrapper"])
        return call.__flatten__()

    def _unbuilt(self) -> _Unbuilt:
        """Return the same object until an argument is replaced: Fiddle knows what it has visited by identity."""
        plain = self.plain()
        kept: _Unbuilt | None = vars(self).get("_kept")
        if kept is None or not _has_the_same_arguments(kept.recipe, plain):
            kept = _Unbuilt(plain)
            object.__setattr__(self, "_kept", kept)
        return kept

    @override
    def __path_elements__(self) -> tuple[Any, ...]:
        return _Part("recipe"), _Part("wrapper")

    @classmethod
    @override
    def __unflatten__(cls, values: Iterable[Any], metadata: Any) -> Any:
        arguments = metadata.arguments(values)
        if not isinstance(arguments["recipe"], _Unbuilt):
            return _Elsewhere()
        return cls.adopt(copy.copy(arguments["recipe"].recipe), arguments["wrapper"])

    @override
    def __build__(self, *args: Any, **kwargs: Any) -> Any:
        built = fdl.Partial.__build__(run.Partial(train), *args, **kwargs)
        built.keywords["recipe"] = copy.deepcopy(built.keywords["recipe"])
        return built


class _Part(fdl.daglish.Attr):
    """Names a part of an enabled recipe that Fiddle sees and that is not an attribute of the recipe."""

    @override
    def follow(self, container: Any) -> Any:
        values, metadata = container.__flatten__()
        return metadata.arguments(values)[self.name]


class _Elsewhere:
    """Stands for what two recipes have in common when Fiddle compares them, and asks it for what is in it."""

    def __getattr__(self, name: str) -> str:
        return f"recipe.{name}"


def _has_the_same_arguments(one: run.Partial, other: run.Partial) -> bool:
    values, metadata = one.__flatten__()
    other_values, other_metadata = other.__flatten__()
    return metadata == other_metadata and all(map(operator.is_, values, other_values))


serialization.register_node_traverser(
    _Unbuilt,
    flatten_fn=lambda value: ((value.recipe,), None),
    unflatten_fn=lambda values, _: _Unbuilt(*values),
    path_elements_fn=lambda _: (fdl.daglish.Attr("recipe"),),
)
register_supported_cast(CheckpointlessRecipe, run.Partial)
yaml.SafeDumper.add_representer(CheckpointlessRecipe, lambda dumper, recipe: dumper.represent_data(recipe.plain()))

# --- Changes a NeMo-Run recipe so that it recovers from memory, and says what prevents that ---------------------

_DEFAULT_REPLICAS = 2
# Callbacks of nvidia-resiliency-ext (NVRx) and why they cannot stay; by name, as the package need not be installed.
_UNFIT_CALLBACKS = {
    "FaultToleranceCallback": "it reports to NVRx's launcher, which restarts all processes",
    "FaultToleranceSectionsCallback": "it reports to NVRx's launcher, which restarts all processes",
    "StragglerDetectionCallback": "it can be set up once per process, and fails when training is entered again",
}
_EARLY_GATHER = "overlap_param_gather_with_optimizer_step"


def _switch_on(recipe: run.Partial, replicas: int | None = None, enable_checksum: bool = False) -> None:
    """Change a recipe in place, after checking that all can be changed. A second call changes nothing more."""
    strategy = _strategy_of(recipe)
    _check_optimizer(recipe)
    instances = _instances(recipe, strategy, replicas)
    if not _is(strategy, CheckpointlessMegatronStrategy):
        fdl.update_callable(strategy, CheckpointlessMegatronStrategy)
    strategy.num_distributed_optimizer_instances = instances
    _set_callbacks(recipe.trainer, enable_checksum)
    resume = getattr(recipe, "resume", None)
    if isinstance(resume, fdl.Buildable) and _is(resume, AutoResume) and not _is(resume, CheckpointlessAutoResume):
        fdl.update_callable(resume, CheckpointlessAutoResume)


def _strategy_of(recipe: run.Partial) -> Any:
    trainer = getattr(recipe, "trainer", None)
    strategy = getattr(trainer, "strategy", None)
    if not isinstance(trainer, fdl.Buildable) or strategy is None:
        raise ValueError("the recipe has no trainer.strategy: set it to a run.Config of nl.MegatronStrategy")
    if not isinstance(strategy, fdl.Buildable):
        raise ValueError(
            f"trainer.strategy is an instance of {_name(strategy)}: set it to a run.Config, so that it can be "
            "created again after a fault"
        )
    if not _is(strategy, MegatronStrategy):
        raise ValueError(f"trainer.strategy is {_name(strategy)}: only nl.MegatronStrategy can recover from memory")
    if strategy.__fn_or_cls__ is not MegatronStrategy and not _is(strategy, CheckpointlessMegatronStrategy):
        raise ValueError(
            f"trainer.strategy is {_name(strategy)}, a subclass of MegatronStrategy: derive it from "
            "CheckpointlessMegatronStrategy instead"
        )
    ddp = getattr(strategy, "ddp", None)
    sharded = any(getattr(ddp, name, False) for name in ("use_custom_fsdp", "use_megatron_fsdp"))
    if getattr(strategy, "fsdp", None) is not None or sharded:
        raise ValueError(
            "FSDP shards parameters over all data-parallel ranks, so no rank holds a second copy: set "
            "trainer.strategy.fsdp=None, without use_custom_fsdp or use_megatron_fsdp in its ddp"
        )
    if ddp == "pytorch":
        raise ValueError('trainer.strategy.ddp="pytorch" has no Megatron optimizer: set it to "megatron"')
    return strategy


def _check_optimizer(recipe: run.Partial) -> None:
    optim = getattr(recipe, "optim", None)
    of_class = isinstance(optim, fdl.Buildable) and isinstance(optim.__fn_or_cls__, type)
    if of_class and not _is(optim, MegatronOptimizerModule):
        raise ValueError(f"optim is {_name(optim)}: only nl.MegatronOptimizerModule can recover from memory")
    for place in (
        getattr(recipe.trainer, "plugins", None),
        getattr(getattr(recipe, "model", None), "config", None),
    ):
        reason = unsupported(place) or unabortable(place)
        if reason is not None:
            raise ValueError(f"{_name(place)}: {reason}")
    for place in (getattr(optim, "config", None), *_callbacks_of(recipe.trainer)):
        reason = unabortable(place)
        if reason is not None:
            raise ValueError(f"{_name(place)}: {reason}")
        if getattr(place, _EARLY_GATHER, None):
            raise ValueError(
                f"{_name(place)} sets {_EARLY_GATHER}, with which an update cannot be guarded: set it to False"
            )


def _instances(recipe: run.Partial, strategy: Any, replicas: int | None) -> int:
    """Return how many instances of the distributed optimizer are needed; without it Megatron wants one."""
    present = strategy.__arguments__.get("num_distributed_optimizer_instances") or 1
    wanted = replicas if replicas is not None else max(present, _DEFAULT_REPLICAS)
    if wanted < 2:
        raise ValueError(f"replicas={wanted}: a rank that dies is filled by another holder, so 2 are needed")
    config = getattr(getattr(recipe, "optim", None), "config", None)  # in NeMo the optimizer's decides
    distributed = config is None or bool(getattr(config, "use_distributed_optimizer", False))
    layout = _layout_of(recipe.trainer, strategy)
    if layout is not None:
        _require(layout, wanted if distributed else max(2, min(layout.holders())))
    return wanted if distributed else 1


def _set_callbacks(trainer: Any, enable_checksum: bool) -> None:
    """Add our callback if it is missing, and remove the callbacks that cannot be entered again."""
    kept = []
    for callback in _callbacks_of(trainer):
        why = _UNFIT_CALLBACKS.get(_name(callback))
        if why is None:
            kept.append(callback)
        else:
            logger.warning("%s is taken out of the recipe: %s", _name(callback), why)
    ours = next((each for each in kept if _is(each, CheckpointlessCallback)), None)
    if ours is None:
        ours = run.Config(CheckpointlessCallback)
        kept.append(ours)
    if enable_checksum and isinstance(ours, fdl.Buildable):
        ours.enable_checksum = True
    trainer.callbacks = kept


def _callbacks_of(trainer: Any) -> list[Any]:
    callbacks = getattr(trainer, "callbacks", None)
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def _is(value: Any, cls: type) -> bool:
    made = value.__fn_or_cls__ if isinstance(value, fdl.Buildable) else type(value)
    return isinstance(made, type) and issubclass(made, cls)


def _name(value: Any) -> str:
    made = value.__fn_or_cls__ if isinstance(value, fdl.Buildable) else type(value)
    return getattr(made, "__name__", str(made))


# --- Layout of a NeMo-Run recipe ----------------------------------------------------------------------------------


def _layout_of(trainer: object, strategy: object) -> Layout | None:
    """Return the layout on the job's ranks, or on those that the recipe asks for; None if it leaves them open."""
    devices, nodes = getattr(trainer, "devices", None), getattr(trainer, "num_nodes", 1)
    if isinstance(devices, list | tuple):
        devices = len(devices)
    if not isinstance(devices, int) or not isinstance(nodes, int) or devices < 1:
        return None

    def size(of: str, default: int = 1) -> int:
        return getattr(strategy, f"{of}_parallel_size", None) or default

    tensor = size("tensor_model")
    return Layout(
        world_size=int(os.environ.get(WORLD_SIZE_ENV, devices * nodes)),
        ranks_per_node=devices,
        tensor=tensor,
        pipeline=size("pipeline_model"),
        context=size("context"),
        expert=size("expert_model"),
        expert_tensor=size("expert_tensor", tensor),
    )


def _require(layout: Layout, replicas: int) -> None:
    dense, experts = layout.holders()
    if dense and dense % replicas == experts % replicas == 0:
        return
    sizes = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "expert": layout.expert,
        "expert tensor": layout.expert_tensor if layout.expert_tensor != layout.tensor else 1,
    }
    shape = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "no model parallelism"
    made = f"leave {dense} data-parallel ranks" + (f" ({experts} for experts)" if layout.expert > 1 else "")
    raise ValueError(
        f"{layout.world_size} ranks ({shape}) {made if dense else 'do not divide into whole models'}, which cannot "
        f"hold {replicas} replicas: set num_nodes={layout.nodes_for(replicas)} with "
        f"{layout.ranks_per_node} devices each, or smaller parallel sizes"
    )


# --- Switches recovery on in a recipe of NeMo's collection ------------------------------------------------------


def enable(
    recipe: run.Partial,
    replicas: int | None = None,
    *,
    enable_checksum: bool = False,
    wrapper: run.Config | None = None,
) -> CheckpointlessRecipe:
    """Make a pretrain or finetune recipe of ``nemo.collections.llm`` recover from faults without a checkpoint.

    The recipe itself is changed, as by NeMo's own functions that take one; it can be shown, edited, serialised and
    run as before. Enabling it again changes nothing. What is put into it later is switched on when it runs.

    Args:
        recipe: the recipe, for example what ``llm.llama3_8b.pretrain_recipe(...)`` returns.
        replicas: the number of ranks that hold each shard of the optimizer. Default: what the recipe has, but at
            least 2. Without the distributed optimizer, as in most LoRA recipes, all data-parallel ranks hold it
            anyway.
        enable_checksum: compare the replicas before a recovery.
        wrapper: settings of the block that is entered again, as a ``run.Config`` of
            :class:`checkpointless.inprocess.HPWrapper`.

    Returns:
        The recipe.

    Raises:
        TypeError: ``recipe`` is not a ``run.Partial``.
        ValueError: the recipe cannot recover as it is, and is left unchanged; the message is one line that says
            what to change.
    """
    if not isinstance(recipe, run.Partial):
        raise TypeError(f"enable() takes a run.Partial, as NeMo's recipes return it, not {type(recipe).__name__}")
    _switch_on(recipe, replicas, enable_checksum)
    return CheckpointlessRecipe.adopt(recipe, wrapper)
