"""Recovery for Hugging Face's Trainer: ``train(trainer)`` in the place of ``trainer.train()``.

    from checkpointless import HPWrapper
    from checkpointless.integrations.transformers import train

    @HPWrapper()
    def main():
        trainer = Trainer(model=..., args=..., train_dataset=...)
        train(trainer)

The Trainer has the loop (:mod:`checkpointless.integrations.torch.stepped`), and a step begins at ``on_step_begin``.
If the Trainer goes through a step once more, losses, norm and update are those that it had.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import trainer as trainer_module
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from typing_extensions import override

from checkpointless.inprocess import HPCallWrapper, UnrecoverableError, active_call_wrapper
from checkpointless.inprocess.abort import register_trainer_parts
from checkpointless.inprocess.worker_streams import Place, seed_data_workers
from checkpointless.integrations.torch.repeated_steps import repeated_steps
from checkpointless.integrations.torch.stepped import SteppedTraining, led
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.rank_local.declared import DeclaredState, put_value
from checkpointless.state.rng import RngStates
from checkpointless.system.patches import Patch, Patches

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from transformers import Trainer
    from transformers.trainer_utils import TrainOutput

_SEAMS = ("_init_training_state", "_prepare_for_training", "_run_epoch", "_get_grad_norm", "_load_rng_state")
_UNKNOWN = "transformers {} has no Trainer.{}: checkpointless follows the loop of 5.x, install transformers>=5.4,<6"
_OUTSIDE = "a Trainer is trained once: make it in the function that @HPWrapper() wraps, and train once in it"
_DRAWS = (
    "the dataset or its collator draws random numbers in the training process, ahead of the step that uses them, "
    "so that a batch would be another one after a fault: let a worker draw them (dataloader_num_workers=1)"
)
_IN_MEMORY = "checkpointless"  # stands for a checkpoint's path where training resumes from memory
_LOOKS = 3  # batches of the first steps are looked at
_PLAIN = (type(None), bool, int, float, str, torch.Tensor)
_patches = Patches()
_trained: weakref.WeakSet[Trainer] = weakref.WeakSet()


def train(
    trainer: Trainer,
    resume_from_checkpoint: str | bool | None = None,
    *,
    state: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> TrainOutput:
    """Train as ``trainer.train()`` does, and resume from memory after a fault.

    Call it once, in a function that is wrapped with :class:`checkpointless.HPWrapper` and makes the Trainer.
    Outside of one it is ``trainer.train()``. Restored are model, optimizer, scheduler, random streams, the position
    in the data, ``trainer.state`` and ``trainer.control``, and plain attributes of the Trainer and of callbacks.

    Args:
        trainer: the Trainer, or one of a subclass.
        resume_from_checkpoint: as for ``trainer.train``; it is left out once the job has trained.
        state: what else changes from step to step, by name, as :class:`~checkpointless.PlainTraining` takes it.
        **more: what else ``trainer.train`` takes.

    Returns:
        What ``trainer.train`` returns.

    Raises:
        UnrecoverableError: something that is configured cannot be carried through a fault.
        StateLostError: steps were committed and no rank holds them any more.
    """
    call = active_call_wrapper()
    if call is None:
        return trainer.train(resume_from_checkpoint, **more)
    reason = _refusal(trainer)
    if reason is not None:
        raise UnrecoverableError(reason)
    _trained.add(trainer)
    streams = resume_from_checkpoint
    if isinstance(streams, bool):
        streams = get_last_checkpoint(trainer.args.output_dir) if streams else None
    if call.high_water > 0:
        resume_from_checkpoint = None  # memory has what is newer, and a save may be half written
    entry = _Entry(call, trainer, state, streams)
    with entry.entered():
        return trainer.train(resume_from_checkpoint, **more)


def _refusal(trainer: Trainer) -> str | None:
    """Return why a training cannot be recovered exactly, in one line that says what to change; None: it can be."""
    missing = next((name for name in _SEAMS if not hasattr(trainer, name)), None)
    if missing is not None:
        return _UNKNOWN.format(transformers.__version__, missing)
    args, plugin = trainer.args, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    refused = [
        (trainer.is_deepspeed_enabled, "deepspeed: its shards are unknown here: set fsdp"),
        (
            trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2,
            "fsdp: the shards of version 1 are unknown here: set fsdp_config={'version': 2}",
        ),
        (trainer.accelerator.scaler is not None, "fp16: nothing would bring its GradScaler back: set bf16=True"),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size: a step keeps its batches: set per_device_train_batch_size",
        ),
        (args.ignore_data_skip, "ignore_data_skip: training resumes in the middle of the data: leave it out"),
        (args.n_gpu > 1, "several GPUs in one process have no replicas: start a process for each GPU"),
        (trainer in _trained, _OUTSIDE),
    ]
    return next((reason for is_refused, reason in refused if is_refused), None)


@dataclass
class _Attributes:
    """Plain attributes of an object that training changes; those of a script's class are named if not kept."""

    name: str
    target: Callable[[], Any]
    is_script: bool = False
    leave: str = ""

    def values(self) -> Mapping[str, Any]:
        return {
            name: value
            for name, value in vars(self.target()).items()
            if name != self.leave and (self.is_script or isinstance(value, (*_PLAIN, dict)))
        }

    def put(self, values: Mapping[str, Any]) -> None:
        target = self.target()
        for name, value in values.items():
            setattr(target, name, put_value(getattr(target, name, None), value))


def _is_script(value: object) -> bool:
    return type(value).__module__.partition(".")[0] != "transformers"


class _TrainerTraining(SteppedTraining):
    def __init__(self, call: HPCallWrapper, trainer: Trainer, state: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self.position = (0, 0)  # the epoch, and how many of its batches precede the step in the making
        self.norm: float | None = None  # of the gradients of the step in the making
        self._objects: Mapping[str, Any] = {}
        callbacks = [
            _Attributes(f"{number}.{type(each).__name__}", lambda each=each: each, is_script=_is_script(each))  # type: ignore[misc]
            for number, each in enumerate(trainer.callback_handler.callbacks)
            if (_is_script(each) and not isinstance(each, _Entry)) or isinstance(each, ExportableState)
        ]
        own = [
            _Attributes("trainer", lambda: trainer, leave="_eval_dataloaders"),
            _Attributes("state", lambda: trainer.state, leave="log_history"),
            _Attributes("control", lambda: trainer.control),
        ]
        self._attributes = DeclaredState(lambda: [*own, *callbacks])
        self._early = DeclaredState(lambda: own[1:2])
        super().__init__(
            call, [trainer.model_wrapped], [trainer.optimizer.optimizer], [trainer.lr_scheduler], state
        )

    def recover(self, position: tuple[int, int]) -> tuple[int, int]:
        """Recover from memory, if there is something; return where to begin, else ``position``. Collective."""
        self.position = position
        objects = self.resume(self._trainer.state.global_step)
        if objects is not None:
            self._objects = objects
            self.position = tuple(self.own["position"])
            self._early.put(self.own["attributes"])
            self._trainer.state.log_history[:] = objects["history"]
            if self.point is not SnapshotPoint.LOADED:
                self._trainer.args.eval_on_start = False
        return self.position

    @override
    def begin_step(self) -> None:
        self.norm = None
        super().begin_step()

    @override
    def _put_back(self) -> None:
        super()._put_back()
        self._attributes.put(self.own["attributes"])
        self._trainer.state.log_history[:] = self._objects["history"]

    @override
    def _epoch(self) -> int:
        return int(self.position[0])

    @override
    def _noted(self) -> dict[str, Any]:
        return {"attributes": self._attributes.take(), "position": list(self.position), "norm": self.norm}

    @override
    def _capture(self, step: int) -> Callable[[], dict[str, Any]]:
        capture, history = super()._capture(step), list(self._trainer.state.log_history)
        return lambda: {**capture(), "history": history}


class _Entry(TrainerCallback):  # type: ignore[misc]
    """One call of ``trainer.train`` in a block: what is done at each of the Trainer's seams."""

    _training: _TrainerTraining  # from the point at which the Trainer has made model and optimizer

    def __init__(
        self, call: HPCallWrapper, trainer: Trainer, state: Mapping[str, Any], streams: str | None
    ) -> None:
        self._call = call
        self._trainer = trainer
        self._state = state
        self._streams = streams  # the checkpoint from which the first step's random streams come
        self._loader: Any = None
        self._epoch = self._taken = self._looks = 0
        self._is_first_of_pass = True
        self.iterators: list[weakref.ref[Any]] = []  # over loaders with workers, the newest first

    @contextmanager
    def entered(self) -> Iterator[None]:
        trainer, seams = self._trainer, self._seams()
        self._prepare = trainer._prepare_for_training
        trainer.callback_handler.callbacks.insert(0, self)
        for part in (self._call.wrapper.abort, self._call.wrapper.finalize):
            register = getattr(part, "register_attributes", None)
            if register is not None:
                register(self)
        if self._call.faults is not None:
            self._call.faults.batches = lambda: next(_Parts().loader_iterators(self), None)
        self._call.enter_phase("init", self._call.high_water)
        skips = functools.partial(functools.partial, self._make_loader)
        _patches.make([Patch(trainer_module, "skip_first_batches", skips, "ends workers of this loader, too")])
        try:
            with led(trainer, seams):
                yield
            self._training.end()
        finally:
            trainer.callback_handler.callbacks.remove(self)
            _patches.undo()

    def _seams(self) -> dict[str, Callable[..., Any]]:
        seams: dict[str, Callable[..., Any]] = {
            "get_train_dataloader": self._make_loader,
            "get_eval_dataloader": self._make_eval_loader,
            "_init_training_state": self._begin,
            "_prepare_for_training": lambda original, *args, **kwargs: self._prepared,
            "_run_epoch": self._run_epoch,
            "_load_rng_state": self._load_streams,
            "get_batch_samples": self._take_batches,
            "training_step": self._compute_batch,
            "_clip_grad_norm": self._clip,
            "_get_grad_norm": self._note_norm,
        }
        return seams if self._call.faults is None else {**seams, "compute_loss": self._announce_backward}

    # --- the data -----------------------------------------------------------------------------------------------

    def _make_loader(self, original: Callable[..., DataLoader[Any]], *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Make a loader of the epoch's batches, or of those of an epoch that are left."""
        self._loader = loader = original(*args, **kwargs)
        self._seed_workers(loader, "train", lambda: Place(self._epoch))
        return loader

    def _make_eval_loader(
        self, original: Callable[..., DataLoader[Any]], *args: Any, **kwargs: Any
    ) -> DataLoader[Any]:
        loader = original(*args, **kwargs)
        self._seed_workers(loader, "eval", lambda: Place(None))
        return loader

    def _seed_workers(self, loader: Any, stream: str, place: Callable[[], Place]) -> None:
        args, inner = self._trainer.args, getattr(loader, "base_dataloader", loader)
        if inner.num_workers > 0 and inner._iterator is None:
            seed = args.seed if args.data_seed is None else args.data_seed
            seed_data_workers(inner, seed, rank=args.process_index, stream=stream, place=place)
            if inner.persistent_workers and inner.generator is None:
                inner.generator = torch.Generator().manual_seed(seed)  # so that making workers again draws nothing
            inner._get_iterator = functools.partial(self._make_iterator, weakref.proxy(inner), type(inner))

    def _make_iterator(self, loader: Any, kind: Any) -> Any:
        iterator = kind._get_iterator(loader)
        self.iterators = [weakref.ref(iterator), *(each for each in self.iterators if each() is not None)]
        return iterator

    def _run_epoch(self, original: Callable[..., None], **kwargs: Any) -> None:
        training = self._training
        epoch, taken = kwargs["epoch"], 0
        if epoch == kwargs["epochs_trained"]:
            taken = kwargs["steps_trained_in_current_epoch"]
            if training.point is not None:
                loads = training.point is SnapshotPoint.LOADED and self._streams is not None
                kwargs["resume_from_checkpoint"] = _IN_MEMORY if taken > 0 or loads else None
            elif kwargs["resume_from_checkpoint"] is None:
                taken = 0
        self._epoch, self._taken, self._is_first_of_pass = epoch, taken, True
        original(**kwargs)

    def _load_streams(self, original: Callable[[str | None], None], checkpoint: str | None) -> None:
        if self._training.point is SnapshotPoint.LOADED:  # of which streams were kept before the Trainer loads them
            original(self._streams)
        elif checkpoint != _IN_MEMORY:
            original(checkpoint)

    def _take_batches(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        training, call = self._training, self._call
        if not training.is_replaying:
            call.begin_step(training.step + 1)
            call.enter_phase("data", training.step + 1)
        training.position = self._epoch, self._taken
        looks = self._loader.num_workers == 0 and not self._is_first_of_pass and self._looks < _LOOKS
        before = RngStates.capture() if looks else None
        batches, items = original(*args, **kwargs)
        if before is not None:
            self._looks += 1
            if RngStates.capture().streams != before.streams:
                raise UnrecoverableError(_DRAWS)
        self._taken += len(batches)
        self._is_first_of_pass = False
        if not training.is_replaying:
            for batch in batches:
                repeated_steps.take(training.step + 1, batch)
        return batches, items

    # --- a step ---------------------------------------------------------------------------------------------------

    def _begin(self, original: Callable[..., tuple[int, int]], *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Have model, optimizer and scheduler made, and their state put in place."""
        trainer, bound = self._trainer, inspect.signature(original).bind(*args, **kwargs).arguments
        position = original(*args, **kwargs)
        self._call.beat()
        self._prepared = self._prepare(bound["max_steps"], self._loader, bound["resume_from_checkpoint"])
        self._training = _TrainerTraining(self._call, trainer, self._state)
        position = self._training.recover(position)
        self._call.beat()
        return position

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._training.begin_step()

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self._call.beat()

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        repeated_steps.was_validated = True

    def _compute_batch(self, original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        training = self._training
        if training.replayed is not None:
            losses = training.replayed["losses"]
            loss = losses[len(training.losses)].to(self._trainer.args.device)
        else:
            self._call.enter_phase("forward", self._call.steps.making)
            loss = original(*args, **kwargs)
        training.losses.append(loss)
        return loss

    def _announce_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if loss.requires_grad:
            loss.register_hook(lambda _: self._call.enter_phase("backward", self._call.steps.making))
        return result

    def _clip(self, original: Callable[..., Any], model: torch.nn.Module) -> Any:
        training = self._training
        return original(model) if training.replayed is None else training.replayed["norm"]

    def _note_norm(self, original: Callable[..., Any], model: torch.nn.Module, grad_norm: Any = None) -> Any:
        training = self._training
        if training.replayed is not None:
            return training.replayed["norm"]
        norm = original(model, grad_norm)
        training.norm = float(norm.item() if isinstance(norm, torch.Tensor) else norm)
        return training.norm


class _Parts:
    """Finds what an abort has to stop."""

    def loader_iterators(self, trainer: object) -> Iterator[Any]:
        """Yield torch's iterators with workers, the newest first."""
        found = (each() for each in trainer.iterators) if isinstance(trainer, _Entry) else iter(())
        return (each for each in found if each is not None)

    def stop_saves(self, trainer: object) -> None:
        """The Trainer saves in its own thread."""


register_trainer_parts("transformers", _Parts())
