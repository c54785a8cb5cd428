"""Test that the books of checkpoint callbacks are right when a save has failed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.nemo


def callback_with(**models: float) -> Any:
    """Return a callback that keeps the two best."""
    from nemo.lightning.pytorch.callbacks import ModelCheckpoint

    callback = ModelCheckpoint(dirpath="/ckpt", monitor="loss", save_top_k=2)
    callback.best_k_models = {f"/ckpt/{name}.ckpt": torch.tensor(score) for name, score in models.items()}
    callback.last_model_path = "/ckpt/old-last.ckpt"
    return callback


def save(callback: Any) -> None:
    """Do to the books what NeMo does in a background save of ``new``, which is the best."""
    worst = max(callback.best_k_models, key=lambda path: float(callback.best_k_models[path]))
    del callback.best_k_models[worst]
    callback.best_k_models["/ckpt/new.ckpt"] = torch.tensor(0.1)
    callback.best_model_path, callback.kth_best_model_path = "/ckpt/new.ckpt", "/ckpt/good.ckpt"
    callback.best_model_score, callback.kth_value = torch.tensor(0.1), torch.tensor(0.5)
    callback.deferred_ckpts_to_remove.append([worst])


def books(callback: Any) -> dict[str, Any]:
    return {
        "models": {path: float(score) for path, score in callback.best_k_models.items()},
        "best": (callback.best_model_path, float(callback.best_model_score)),
        "worst": (callback.kth_best_model_path, float(callback.kth_value)),
        "last": callback.last_model_path,
    }


RIGHT = {
    "models": {"/ckpt/good.ckpt": 0.5, "/ckpt/bad.ckpt": pytest.approx(0.9)},
    "best": ("/ckpt/good.ckpt", 0.5),
    "worst": ("/ckpt/bad.ckpt", pytest.approx(0.9)),
    "last": "/ckpt/old-last.ckpt",
}


def test_books_are_put_back() -> None:
    from checkpointless.integrations.lightning.checkpoints.saves import _books_of, _new_paths

    callback = callback_with(good=0.5, bad=0.9)
    earlier = ["/ckpt/earlier"]
    callback.deferred_ckpts_to_remove.append(earlier)
    before = _books_of(callback)
    save(callback)
    assert _new_paths(callback, before) == ["/ckpt/new.ckpt"]
    vars(callback).update(before)
    (removal,) = callback.deferred_ckpts_to_remove
    assert removal is earlier
    assert set(callback.best_k_models) == {"/ckpt/good.ckpt", "/ckpt/bad.ckpt"}


def test_a_background_save_that_fails_later_is_struck_out() -> None:
    from checkpointless.integrations.lightning.checkpoints.saves import _books_of, replaced, undo

    callback = callback_with(good=0.5, bad=0.9)
    before = _books_of(callback)
    save(callback)
    was = json.loads(json.dumps(replaced(callback, before)))  # another process gets it so
    undo(callback, "/ckpt/new.ckpt", was)
    assert books(callback) == RIGHT
    undo(callback, "/ckpt/new.ckpt", was)  # there is nothing of it any more
    assert books(callback) == RIGHT


def test_the_last_checkpoint_is_the_one_before() -> None:
    from checkpointless.integrations.lightning.checkpoints.saves import undo

    callback = callback_with(good=0.5, bad=0.9)
    callback.last_model_path = "/ckpt/new-last.ckpt"
    undo(callback, "/ckpt/new-last", {"last": "/ckpt/old-last.ckpt"})
    assert books(callback) == RIGHT


@pytest.mark.parametrize("keeps_last", [True, False])
def test_the_first_save_of_all_is_struck_out_with_nothing_before_it(keeps_last: bool) -> None:
    """Without a monitor the best is the newest; its second save of the same step, the last, fails after it."""
    from nemo.lightning.pytorch.callbacks import ModelCheckpoint

    from checkpointless.integrations.lightning.checkpoints.saves import undo

    callback: Any = ModelCheckpoint(dirpath="/ckpt", monitor=None, save_top_k=-1)
    callback.best_model_path = "/ckpt/new.ckpt"
    callback.last_model_path = "/ckpt/new-last.ckpt" if keeps_last else ""
    undo(callback, "/ckpt/new", {})
    undo(callback, "/ckpt/new-last", {})
    assert (callback.best_model_path, callback.last_model_path) == ("", "")
