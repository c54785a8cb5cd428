"""Trains a recipe in this rank's process: `python -m checkpointless.recipes.runner RECIPE key=value...`.

Every rank runs it, started by `checkpointless run`, torchrun or srun, with the environment that torchrun sets.
Nothing is kept from one call of `train` to the next: with checkpointless on, everything in it is done again in the
same process after a fault.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from checkpointless.integrations.megatron import cpu_platform
from checkpointless.recipes.checks import check, layout_of, tiers_of
from checkpointless.recipes.settings import (
    RecipeError,
    checkpointless_enabled,
    first_line,
    load,
    missing,
    needs_gpu,
    remember,
    require_complete,
)
from checkpointless.system.environment import own_world_size

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from nemo import lightning as nl

# NeMo and what it imports look things up on the network unless told otherwise.
OFFLINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class _Job:
    model: pl.LightningModule
    data: pl.LightningDataModule
    optim: nl.OptimizerModule
    trainer: nl.Trainer
    log: nl.NeMoLogger | None
    resume: nl.AutoResume | None


def prepare_process() -> None:
    """Prepare for the import of NeMo: set its environment and, if it is asked for, install the CPU platform.

    A variable that the user has set stays as it is.
    """
    for name, value in OFFLINE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if cpu_platform.requested():
        cpu_platform.install()


def _with_checkpointless(config: DictConfig) -> DictConfig:
    """Return the recipe with the strategy and the callback that its `checkpointless:` block stands for."""
    config = config.copy()
    config.strategy._target_ = "checkpointless.strategies.CheckpointlessMegatronStrategy"
    for name, default in (("warm", True), ("sdc_check_every", None)):
        OmegaConf.update(config, f"strategy.{name}", config.checkpointless.get(name, default), force_add=True)
    callback = {
        "_target_": "checkpointless.callbacks.CheckpointlessCallback",
        "enable_checksum": config.checkpointless.get("enable_checksum", False),
    }
    OmegaConf.update(config, "callbacks.checkpointless", callback, force_add=True)
    return config


def _completed(config: DictConfig) -> DictConfig:
    """Return the recipe with everything that its objects are made of, which is the same each time they are made."""
    check(config, layout_of(config, 1, own_world_size()))
    if needs_gpu(config) and not torch.cuda.is_available():
        raise RecipeError("this recipe needs GPUs, and there is none here")
    whole = _with_checkpointless(config) if checkpointless_enabled(config) else config.copy()
    OmegaConf.resolve(whole)
    return whole


def build(config: DictConfig) -> _Job:
    """Make the objects that a recipe describes.

    Raises:
        RecipeError: an object cannot be made from what the recipe gives it, or the layout does not fit the ranks.
    """
    return _objects(_completed(config))


def _objects(config: DictConfig) -> _Job:
    part: Callable[..., Any] = functools.partial(make, config)
    data = part("data")
    model = part("model", tokenizer=data.tokenizer)
    made = [part(f"callbacks.{name}") for name in config.get("callbacks") or ()]
    callbacks = [each for each in made if each is not None]  # null takes one out
    trainer = part("trainer", strategy=part("strategy"), callbacks=callbacks)
    peft = part("peft")
    if peft is not None:
        _set_with_io(model, "model_transform", peft)
        trainer.callbacks.append(peft)
    return _Job(model, data, part("optim"), trainer, part("log"), part("resume"))


def _fit(config: DictConfig) -> nl.Trainer:
    """Train a completed recipe. This is the block that is executed again after a fault."""
    prepare_process()
    job = _objects(config)
    prepare_process()  # for what has been imported since
    if job.log is not None:
        job.log.setup(job.trainer, resume_if_exists=getattr(job.resume, "resume_if_exists", False))
    if job.resume is not None:
        job.resume.setup(job.trainer, job.model)
    job.optim.connect(job.model)
    job.trainer.fit(job.model, job.data)
    return job.trainer


def _fit_if_it_can_be_made(config: DictConfig, generation: int) -> nl.Trainer:
    """Train a completed recipe; what it cannot make at the start of the job, it cannot make the next time either.

    What a network or a file system has failed at may pass, so that is tried again as after any other fault.
    """
    from checkpointless.inprocess import UnrecoverableError

    try:
        return _fit(config)
    except RecipeError as error:
        if generation > 0 or _may_pass(error):
            raise
        raise UnrecoverableError(str(error)) from error


def _may_pass(error: BaseException | None) -> bool:
    """Return whether what has raised ``error`` may succeed the next time."""
    while error is not None:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | PermissionError):
            return True
        error = error.__cause__
    return False


def train(config: DictConfig) -> nl.Trainer:
    """Train a recipe, and recover from faults if it has a `checkpointless:` block.

    Returns:
        The trainer, after the last step.
    """
    whole = _completed(config)
    if not checkpointless_enabled(config):
        return _fit(whole)
    from checkpointless.inprocess import HPCallWrapper, HPWrapper
    from checkpointless.recovery import CheckpointManager, PEFTCheckpointManager
    from checkpointless.transfer.transfer import MEMORY_BUDGET_BYTES

    manager = (CheckpointManager if config.get("peft") is None else PEFTCheckpointManager)(
        enable_checksum=config.checkpointless.get("enable_checksum", False),
        enable_offload=config.checkpointless.get("enable_offload", False),
        allow_restart_from_scratch=config.checkpointless.get("allow_restart_from_scratch", False),
        memory_budget_bytes=config.checkpointless.get("memory_budget_bytes", MEMORY_BUDGET_BYTES),
        rng_replication_jump=config.checkpointless.get("rng_replication_jump"),
        tiers=tiers_of(config),
    )

    @HPWrapper(checkpoint_manager=manager)
    def block(caller: HPCallWrapper) -> nl.Trainer:
        return _fit_if_it_can_be_made(whole, caller.generation)

    return block()


def before_ranks(arguments: Sequence[str]) -> None:
    """Do once what each rank would do first: the process that they are forked from calls this.

    Raises:
        RecipeError: the recipe cannot be read, which each rank will say.
    """
    config = remember(arguments[0])
    # Both fill what OmegaConf remembers of classes and syntax. Neither the values that are given behind the recipe
    # nor a rank's own variables are known here.
    with contextlib.suppress(OmegaConfBaseException):
        missing(config)
    with contextlib.suppress(OmegaConfBaseException):
        OmegaConf.to_container(config.copy(), resolve=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Train the recipe that is named first in `argv`, with the overrides that follow it.

    Returns:
        The exit status: 0, or 2 after one line on standard error if the recipe cannot be used.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if not arguments or arguments[0].startswith("-"):
            raise RecipeError("usage: python -m checkpointless.recipes.runner RECIPE [key=value ...]")
        config = load(arguments[0], arguments[1:])
        require_complete(config, arguments[0])
        train(config)
    except RecipeError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _set_with_io(target: Any, attribute: str, value: Any) -> None:
    """Set an attribute as if `target` had been made with it: NeMo's checkpoints describe how objects were made."""
    setattr(target, attribute, value)
    if hasattr(target, "__io__") and hasattr(value, "__io__"):
        setattr(target.__io__, attribute, copy.deepcopy(value.__io__))


# --- The objects that a recipe describes --------------------------------------------------------------------------
#
# The keys are Hydra's, and containers are plain, as with its `_convert_="all"`. Hydra itself copies, merges and
# resolves the configuration of each object, which took two thirds of the time until a rank had its objects again.

_TARGET, _ARGS, _PARTIAL, _RECURSIVE = "_target_", "_args_", "_partial_", "_recursive_"
_DOWNLOADS = " (NeMo downloads what a recipe leaves out, such as a tokenizer: name one that is here)"
_OWN_KEYS = frozenset({_TARGET, _ARGS, _PARTIAL, _RECURSIVE, "_convert_"})


def make(config: DictConfig, key: str, **objects: object) -> object:
    """Make what a part of a recipe describes.

    Args:
        key: dotted key of the part. What has a `_target_` in it becomes what that returns.
        objects: further arguments of the part's own target; they take the place of those in the recipe.

    Returns:
        The object, or a new container of what its items describe; None if the recipe does not have the part.
    """
    part = OmegaConf.select(config, key)
    if not OmegaConf.is_config(part):
        return part
    return _made(OmegaConf.to_container(part, resolve=True, throw_on_missing=True), key, True, objects)


def _made(node: Any, where: str, recursive: bool, objects: dict[str, object]) -> Any:
    if isinstance(node, list):
        return [_made(each, f"{where}[{index}]", recursive, {}) for index, each in enumerate(node)]
    if not isinstance(node, dict):
        return node
    recursive = node.get(_RECURSIVE, recursive)
    if _TARGET not in node:
        return {name: _made(value, f"{where}.{name}", recursive, {}) for name, value in node.items()}
    called = _called(node[_TARGET], where)
    args = node.get(_ARGS, [])
    given = {name: value for name, value in node.items() if name not in _OWN_KEYS and name not in objects}
    if recursive:
        args = _made(args, f"{where}.{_ARGS}", True, {})
        given = {name: _made(value, f"{where}.{name}", True, {}) for name, value in given.items()}
    try:
        if node.get(_PARTIAL, False):
            return functools.partial(called, *args, **given, **objects)
        return called(*args, **given, **objects)
    except Exception as error:
        fetches = isinstance(error, OSError) and not error.filename
        raise RecipeError(f"{where}: {first_line(error)}{_DOWNLOADS if fetches else ''}") from error


def _called(target: Any, where: str) -> Any:
    try:
        found = get_object(target)
    except Exception as error:
        raise RecipeError(f"{where}: _target_ {target} cannot be imported: {first_line(error)}") from error
    if not callable(found):
        raise RecipeError(f"{where}: _target_ {target} cannot be called")
    return found


if __name__ == "__main__":
    sys.exit(main())
