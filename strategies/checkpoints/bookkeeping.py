"""What Lightning's and NeMo's checkpoint callbacks believe to be on storage; a save that failed is struck out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from checkpointless.strategies.checkpoints.tolerance import folder_of

_REMOVALS = "deferred_ckpts_to_remove"
_NAMES = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "kth_best_model_path",
    "kth_value",
    "current_score",
    "last_model_path",
    "future_last_model_path",
    "_last_checkpoint_saved",
    "ckpts_to_link",
    _REMOVALS,
)


@dataclass(frozen=True)
class Bookkeeping:
    """A callback's books at one moment.

    Attributes:
        values: the callback's attributes, by name.
    """

    values: Mapping[str, Any]

    @classmethod
    def of(cls, callback: ModelCheckpoint) -> Bookkeeping:
        """Return the books of ``callback``, in which nothing changes any more."""
        values = {name: getattr(callback, name) for name in _NAMES if hasattr(callback, name)}
        return cls({name: _copied(value) for name, value in values.items()})

    def put_back(self, callback: ModelCheckpoint) -> None:
        """Put the books back; the step of the newest save stays, so that the same step is not tried again."""
        for name, value in self.values.items():
            if name == _REMOVALS:
                getattr(callback, name)[:] = value  # earlier saves refer to this list and those in it
            else:
                setattr(callback, name, _copied(value))

    def new_paths(self, callback: ModelCheckpoint) -> list[str]:
        """Return the paths that ``callback`` has begun to believe in since then."""
        then = {*self.values["best_k_models"], self.values["best_model_path"], self.values["last_model_path"]}
        now = [*callback.best_k_models, callback.best_model_path, callback.last_model_path]
        return list(dict.fromkeys(path for path in now if path and path not in then))

    def changed(self, callback: ModelCheckpoint) -> BookkeepingOfSave:
        """Return what a save of ``callback`` has changed since then."""
        models = self.values["best_k_models"]
        dropped = {path: score for path, score in models.items() if path not in callback.best_k_models}
        removals = getattr(callback, _REMOVALS, [])
        return BookkeepingOfSave(
            {path: float(score) for path, score in dropped.items()},
            str(self.values["best_model_path"]),
            str(self.values["last_model_path"]),
            removals,
            removals[-1] if removals else None,
        )


def _copied(value: Any) -> Any:
    """Return a copy of a list or dictionary; what is in it is not changed in place, and neither are scores."""
    return type(value)(value) if isinstance(value, list | dict) else value


@dataclass(frozen=True)
class BookkeepingOfSave:
    """What a background save has changed in a callback's books.

    Attributes:
        dropped: the models that are no longer among the best because of it, with their scores.
        best: the best model before it.
        last: the last checkpoint before it.
        removals: the callback's lists of what the ends of its saves remove.
        removal: the one of this save.
    """

    dropped: Mapping[str, float] = field(default_factory=dict)
    best: str = ""
    last: str = ""
    removals: list[list[str]] = field(default_factory=list)
    removal: list[str] | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return what the other ranks may have to know, as plain data."""
        return {"dropped": dict(self.dropped), "best": self.best, "last": self.last}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> BookkeepingOfSave:
        """Return what a rank said."""
        return cls(**plain)

    def drop_removals(self) -> None:
        """Keep what the end of the save would have removed."""
        self.removals[:] = [each for each in self.removals if each is not self.removal]


def undo(callback: object, folder: str, of_save: BookkeepingOfSave) -> None:
    """Strike a save that failed out of a callback's books, and take back what it replaced.

    Args:
        callback: any callback; one that keeps no such books stays as it is.
        folder: the folder of the save.
        of_save: what the save has changed.
    """
    if not isinstance(callback, ModelCheckpoint):
        return
    known = {*callback.best_k_models, callback.best_model_path, callback.last_model_path}
    failed = {path for path in known if path and folder_of(path) == folder}  # "": there is none
    if not failed:
        return
    models = {path: score for path, score in callback.best_k_models.items() if path not in failed}
    for path, score in of_save.dropped.items():
        models.setdefault(path, torch.tensor(score))
    callback.best_k_models = models
    if callback.last_model_path in failed:
        callback.last_model_path = of_save.last
    links = getattr(callback, "ckpts_to_link", {})
    for path in [path for path in links if folder_of(path) == folder]:
        del links[path]
    if callback.monitor is None:
        if callback.best_model_path in failed:
            callback.best_model_path = of_save.best
        return
    by_score = sorted(models, key=lambda path: float(models[path]), reverse=callback.mode != "min")
    callback.best_model_path, callback.kth_best_model_path = (by_score[0], by_score[-1]) if by_score else ("", "")
    callback.best_model_score = models[by_score[0]] if by_score else None
    callback.kth_value = models[by_score[-1]] if by_score else None  # type: ignore[assignment]  # as NeMo does
