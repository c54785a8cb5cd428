"""What a recipe describes is made as Hydra makes it, but always of plain containers."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("hydra", reason="recipes need hydra-core")

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from checkpointless.recipes.runner import make
from checkpointless.recipes.settings import RecipeError


class Part:
    """Keeps what it was made of."""

    def __init__(self, *args: Any, **given: Any) -> None:
        self.args, self.given = args, given

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and (self.args, self.given) == (other.args, other.given)

    __hash__ = None  # type: ignore[assignment]


PART = f"{__name__}.Part"


def recipe(part: Any) -> DictConfig:
    config = OmegaConf.create({"size": 3, "part": part})
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
    config = recipe(part)
    made = make(config, "part")
    assert made == (instantiate(config.part, _convert_="all") if OmegaConf.is_config(config.part) else part)
    assert not OmegaConf.is_config(made)


def test_partial_objects_take_their_last_arguments_later() -> None:
    made = make(recipe({"_target_": PART, "_partial_": True, "_args_": [1], "x": 2}), "part")
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
        make(recipe(part), "part")
    assert "\n" not in str(raised.value)
