"""What a recipe describes is made as Hydra makes it, but of plain containers; what cannot be made is said."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra", reason="recipes need hydra-core")

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from checkpointless.inprocess import UnrecoverableError
from checkpointless.recipes import runner
from checkpointless.recipes.checks import check, layout_of
from checkpointless.recipes.runner import make
from checkpointless.recipes.settings import RECIPE_PRELOAD, RecipeError, load, preloads_of

pytestmark = pytest.mark.nemo


class Part:
    def __init__(self, *args: Any, **given: Any) -> None:
        self.args, self.given = args, given

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and (self.args, self.given) == (other.args, other.given)

    __hash__ = None  # type: ignore[assignment]


PART = f"{__name__}.Part"


def recipe_of(part: Any, **more: Any) -> DictConfig:
    config = OmegaConf.create({"size": 3, "part": part, **more})
    assert isinstance(config, DictConfig)
    return config


@pytest.mark.parametrize(
    "part",
    [
        {"_target_": PART, "size": "${size}", "sizes": [1, "${size}"], "names": {"a": None, "b": True}},
        {"_target_": PART, "_args_": [1, {"_target_": PART, "x": 1}], "y": {"_target_": PART}},
        {"_target_": PART, "list": [{"_target_": PART, "z": [{"_target_": PART}]}], "empty": [], "none": {}},
        {"_target_": PART, "_recursive_": False, "inner": {"_target_": PART, "x": [1]}},
        {"_target_": "hydra.utils.get_object", "path": "json.dumps"},
        [{"_target_": PART}, 1, "x"],
        {"no": "target", "but": {"_target_": PART}},
        "text",
        1.5,
        None,
    ],
)
def test_it_is_what_hydra_makes(part: Any) -> None:
    config = recipe_of(part)
    made = make(config, "part")
    assert made == (instantiate(config.part, _convert_="all") if OmegaConf.is_config(config.part) else part)
    assert not OmegaConf.is_config(made)


def test_partial_objects_take_their_last_arguments_later() -> None:
    made = make(recipe_of({"_target_": PART, "_partial_": True, "_args_": [1], "x": 2}), "part")
    assert isinstance(made, functools.partial)
    assert made(y=3) == Part(1, x=2, y=3)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"_target_": "no.such.thing"}, "part: _target_ no.such.thing cannot be imported: "),
        ({"_target_": "math.pi"}, "part: _target_ math.pi cannot be called"),
        ({"x": [{"_target_": "builtins.int", "_args_": ["no"]}]}, r"part\.x\[0\]: invalid literal"),
        ({"_target_": "builtins.int", "nonsense": 1}, "part: .*nonsense"),
    ],
)
def test_what_cannot_be_made_is_named(part: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        make(recipe_of(part), "part")
    assert "\n" not in str(raised.value)


@pytest.fixture
def recipe() -> DictConfig:
    """Return a recipe whose tokenizer would be downloaded, and whose model wants what is not installed."""
    data = {"_target_": "urllib.request.urlopen", "url": "http://127.0.0.1:1/vocabulary"}
    return recipe_of(None, data=data, model={"_target_": "builtins.int", "_args_": ["no number"]})


def test_what_cannot_be_made_at_the_start_is_no_fault(recipe: DictConfig) -> None:
    recipe.data = recipe.model
    with pytest.raises(UnrecoverableError, match="data: invalid literal"):
        runner._fit_if_it_can_be_made(recipe, generation=0)
    with pytest.raises(RecipeError, match="data: "):  # after a fault it may be: a disk that was lost
        runner._fit_if_it_can_be_made(recipe, generation=1)


def test_a_network_that_fails_may_work_the_next_time(recipe: DictConfig) -> None:
    with pytest.raises(RecipeError, match=r"data: .*refused.*name one that is here"):
        runner._fit_if_it_can_be_made(recipe, generation=0)


def test_a_callback_that_is_null_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("tiny_gpt_cpu", ["callbacks.one={_target_: builtins.dict, x: 1}", "callbacks.two=null"])
    monkeypatch.setattr(runner, "make", lambda config, key, **given: given or _object_of(config, key))
    assert runner._objects(config).trainer["callbacks"] == [{"x": 1}]  # type: ignore[index]


def _object_of(config: DictConfig, key: str) -> object:
    """Make callbacks alone: the rest needs NeMo's model."""
    if key.startswith("callbacks"):
        return make(config, key)
    return OmegaConf.create({"tokenizer": 1}) if key == "data" else None


def test_a_list_of_callbacks_is_refused_in_a_line() -> None:
    config = load("tiny_gpt_cpu")
    config.callbacks = [{"_target_": "builtins.object"}]
    with pytest.raises(RecipeError, match="callbacks has a name for each callback"):
        check(config, layout_of(config))


def test_what_a_recipe_names_but_the_users_own_is_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("raise RuntimeError('local modules are not for the zygote')")
    monkeypatch.chdir(tmp_path)
    callbacks = [{"_target_": "mine.Clock"}, {"_target_": "torch.nn.Linear", "path": "torch.data"}]
    model = {"config": {"spec": {"_target_": "hydra.utils.get_method", "path": "json.dumps"}}}
    config = OmegaConf.create({"model": model, "c": callbacks})
    assert preloads_of(config) == (*RECIPE_PRELOAD, "hydra.utils.get_method", "torch.nn.Linear")
