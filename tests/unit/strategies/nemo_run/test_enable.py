"""Test which parts of NeMo's recipes are kept, changed or refused when they are switched on. Nothing is trained."""

import copy
import functools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

pytest.importorskip("nemo.collections.llm", reason="needs NeMo")
pytest.importorskip("nemo_run", reason="needs NeMo-Run")

import fiddle as fdl
import nemo_run as run
from fiddle._src import diffing
from lightning.pytorch.callbacks import Callback
from nemo import lightning as nl
from nemo.collections import llm
from nemo_run.core.serialization.yaml import YamlSerializer
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from checkpointless.callbacks import CheckpointlessCallback
from checkpointless.inprocess import HPWrapper
from checkpointless.strategies import CheckpointlessAutoResume, CheckpointlessMegatronStrategy, enable
from checkpointless.strategies.nemo_run import CheckpointlessRecipe, _require, _Unbuilt, train
from checkpointless.system.layout import Layout

pytestmark = pytest.mark.nemo


@dataclass(frozen=True)
class Published:
    module: str
    kind: str = "pretrain"
    replicas: int = 2
    arguments: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        return getattr(getattr(llm, self.module), f"{self.kind}_recipe")(
            name="a_name", dir="/logs", **self.arguments
        )


TWO_NODES = {"num_nodes": 2, "num_gpus_per_node": 8}
PUBLISHED = [
    Published("llama3_8b", arguments=TWO_NODES),
    Published("llama3_8b", arguments=TWO_NODES | {"performance_mode": True}),
    Published("llama3_8b", "finetune", replicas=1, arguments=TWO_NODES | {"peft_scheme": "lora"}),
    Published("llama3_8b", "finetune", arguments=TWO_NODES | {"peft_scheme": None}),
    Published("llama3_70b", "finetune", replicas=1, arguments={"num_nodes": 2, "peft_scheme": "lora"}),
    Published("mixtral_8x7b", arguments={"num_nodes": 8}),
    Published("gpt_oss_20b", "finetune", arguments={"num_nodes": 4, "peft_scheme": None}),
    Published("qwen3_30b_a3b", arguments={"num_nodes": 4}),
    Published("deepseek_v3", arguments={"num_nodes": 256}),
]


def settings(config: Any) -> dict[str, Any]:
    """Return the arguments that a configuration was given, each as text."""
    return {name: repr(value) for name, value in config.__arguments__.items()}


def callbacks(recipe: Any) -> list[Any]:
    return [callback.__fn_or_cls__ for callback in recipe.trainer.callbacks]


def a_recipe(**arguments: Any) -> Any:
    return llm.llama3_8b.pretrain_recipe(name="a_name", dir="/logs", **(TWO_NODES | arguments))


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: f"{each.module}-{each.kind}")
def test_a_published_recipe(published: Published, caplog: pytest.LogCaptureFixture) -> None:
    before, recipe = published.make(), published.make()
    assert enable(recipe) is recipe
    assert isinstance(recipe, CheckpointlessRecipe)
    assert recipe.__fn_or_cls__ is before.__fn_or_cls__

    strategy = recipe.trainer.strategy
    assert strategy.__fn_or_cls__ is CheckpointlessMegatronStrategy
    instances = {"num_distributed_optimizer_instances": str(published.replicas)}
    assert settings(strategy) == settings(before.trainer.strategy) | instances
    changed = {"strategy": "", "callbacks": ""}
    assert settings(recipe.trainer) | changed == settings(before.trainer) | changed
    given = callbacks(before) if getattr(before.trainer, "callbacks", None) else []
    assert callbacks(recipe) == [*given, CheckpointlessCallback]
    assert recipe.resume.__fn_or_cls__ is CheckpointlessAutoResume
    assert settings(recipe.resume) == settings(before.resume)
    for part in ("model", "data", "optim", "log", *(["peft"] if published.kind == "finetune" else [])):
        assert getattr(recipe, part) == getattr(before, part)

    built = fdl.build(strategy)
    assert type(built) is CheckpointlessMegatronStrategy
    assert built.tensor_model_parallel_size == getattr(before.trainer.strategy, "tensor_model_parallel_size", 1)
    assert built.num_distributed_optimizer_instances == published.replicas
    assert type(fdl.build(recipe.resume)) is CheckpointlessAutoResume

    once = copy.deepcopy(recipe)
    enable(recipe)
    assert recipe == once
    assert repr(recipe) == repr(once)


def recipe_in(call: Any) -> Any:
    """Return what is trained with the wrapper whose limit is 30 seconds."""
    assert (call.func, call.keywords["wrapper"].abort_timeout.total_seconds()) == (train, 30)
    return call.keywords["recipe"]


def test_nothing_is_built_before_the_block_is_entered() -> None:
    recipe = enable(a_recipe(), wrapper=run.Config(HPWrapper, abort_timeout=30.0))
    held = recipe_in(fdl.build(recipe))
    assert isinstance(held, _Unbuilt)
    assert held.recipe == recipe.plain()
    recipe.trainer.max_steps = 3
    assert held.recipe.trainer.max_steps != 3, "what was built does not change any more"


def test_it_survives_the_way_that_nemo_run_sends_it() -> None:
    recipe = enable(a_recipe(), wrapper=run.Config(HPWrapper, abort_timeout=30.0))
    recipe.trainer.max_steps = 100
    serializer = ZlibJSONSerializer()
    arrived = serializer.deserialize(serializer.serialize(recipe))
    assert isinstance(arrived, CheckpointlessRecipe)
    assert arrived == recipe
    diffing.build_diff(arrived, recipe)  # NeMo-Run does this before it gives a recipe to an executor
    call = fdl.build(fdl.cast(run.Partial, arrived))  # nemo_run.core.runners.fdl_runner does this
    assert recipe_in(call).recipe == recipe.plain()
    assert "CheckpointlessMegatronStrategy" in YamlSerializer().serialize(recipe)


@dataclass
class Counted:
    name: str
    made = 0

    def __post_init__(self) -> None:
        Counted.made += 1


class Seen(Callback):
    calls = 0


def count_calls(trainer: Any, model: Any = None, data: Any = None) -> tuple[int, bool, int]:
    """Stand in for a training: return how much was made, whether model and data are one object, and the calls."""
    seen = next(each for each in trainer.callbacks if isinstance(each, Seen))
    seen.calls += 1
    return Counted.made, model is data, seen.calls


def test_every_entry_makes_everything_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "made", 0)
    shared = run.Config(Counted, name="shared")
    options = {"strategy": run.Config(nl.MegatronStrategy), "callbacks": [Seen()], "logger": False}
    trainer = run.Config(nl.Trainer, accelerator="cpu", devices=2, **options)
    recipe = enable(run.Partial(count_calls, trainer=trainer, model=shared, data=shared))
    entered = HPWrapper(enabled=False)
    call = fdl.build(recipe)
    assert Counted.made == 0
    assert call(wrapper=entered) == (1, True, 1)
    assert call(wrapper=entered) == (2, True, 1), "made again, and the object that was in the recipe is as it was"


def test_replicas() -> None:
    recipe, asked = a_recipe(), a_recipe()
    asked.trainer.strategy.num_distributed_optimizer_instances = 8
    for given, replicas, instances in ((recipe, 4, 4), (recipe, None, 4), (recipe, 2, 2), (asked, None, 8)):
        assert enable(given, replicas).trainer.strategy.num_distributed_optimizer_instances == instances


def test_nvrx_callbacks_are_taken_out(caplog: pytest.LogCaptureFixture) -> None:
    from nemo.collections.llm.recipes.callbacks.common import straggler_det_callback
    from nvidia_resiliency_ext.ptl_resiliency import FaultToleranceCallback

    recipe = a_recipe()
    recipe.trainer.callbacks += [
        straggler_det_callback(),
        run.Config(FaultToleranceCallback, exp_dir="/logs", autoresume=True, calculate_timeouts=True),
    ]
    enable(recipe)
    assert [each.__name__ for each in callbacks(recipe)] == ["TimingCallback", "CheckpointlessCallback"]
    for name in ("StragglerDetectionCallback", "FaultToleranceCallback"):
        assert f"{name} is taken out" in caplog.text


class OwnStrategy(nl.MegatronStrategy):
    """Stands in for a user's own strategy."""


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("trainer.strategy", None, r"no trainer\.strategy"),
        ("trainer", None, r"no trainer\.strategy"),
        ("trainer.strategy", run.Config(nl.FSDP2Strategy), "only nl.MegatronStrategy"),
        ("trainer.strategy", "ddp", "is an instance of str"),
        ("trainer.strategy", run.Config(OwnStrategy), "derive it from CheckpointlessMegatronStrategy"),
        ("trainer.strategy.fsdp", "megatron", "FSDP shards"),
        ("trainer.strategy.ddp.use_megatron_fsdp", True, "FSDP shards"),
        ("trainer.strategy.ddp", "pytorch", 'set it to "megatron"'),
        ("optim", run.Config(nl.PytorchOptimizerModule), "only nl.MegatronOptimizerModule"),
        ("optim.config.overlap_param_gather_with_optimizer_step", True, "set it to False"),
        ("model.config.tp_comm_overlap", True, "set tp_comm_overlap=False"),
        ("trainer.plugins.fp4", "e2m1", "set fp4=None"),
        ("trainer.strategy.tensor_model_parallel_size", 16, "16 ranks .*set num_nodes=4 with 8 devices"),
        ("trainer.num_nodes", 3, None),
        ("trainer.strategy.ddp", "megatron", None),
        ("trainer.devices", "auto", None),
    ],
)
def test_what_stands_against_it(path: str, value: Any, says: str | None) -> None:
    recipe = a_recipe()
    *parents, last = path.split(".")
    setattr(functools.reduce(getattr, parents, recipe), last, value)
    before = repr(recipe)
    if says is None:
        enable(recipe)
        return
    with pytest.raises(ValueError, match=says) as error:
        enable(recipe)
    assert "\n" not in str(error.value)
    assert repr(recipe) == before, "it is left as it was"


def test_what_is_no_recipe() -> None:
    with pytest.raises(TypeError, match="not Config"):
        enable(llm.llama3_8b.model())
    with pytest.raises(ValueError, match="2 are needed"):
        enable(a_recipe(), replicas=1)


def test_the_ranks_that_there_are_count_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = enable(a_recipe())
    monkeypatch.setenv("WORLD_SIZE", "7")
    with pytest.raises(ValueError, match="7 ranks"):
        fdl.build(recipe)()


@pytest.mark.parametrize(
    ("layout", "replicas", "nodes"),
    [
        (Layout(8, 8, tensor=4, pipeline=2), 2, 2),
        (Layout(8, 8, tensor=8), 2, 2),
        (Layout(24, 8, tensor=8), 2, 4),
        (Layout(64, 8, tensor=8, pipeline=4), 3, 12),
        (Layout(16, 8, expert=16, tensor=2, expert_tensor=1), 2, 4),
        (Layout(3, 1), 2, 4),
        (Layout(8, 8, tensor=3), 2, 3),
    ],
)
def test_a_layout_that_is_too_small_says_how_many_nodes_it_takes(layout: Layout, replicas: int, nodes: int) -> None:
    with pytest.raises(ValueError, match=rf"set num_nodes={nodes} with {layout.ranks_per_node} devices"):
        _require(layout, replicas)
    _require(replace(layout, world_size=nodes * layout.ranks_per_node), replicas)
