"""Megatron-LM's ``pretrain`` of Megatron-core 0.19's wheel, which recovers from faults inside a block."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, training
from megatron.training.checkpointing import checkpoint_exists

from checkpointless.inprocess import UnrecoverableError, active_call_wrapper
from checkpointless.integrations.compat import megatron as compat
from checkpointless.integrations.megatron import cleanup
from checkpointless.integrations.megatron.pretrain_generation import (
    REFUSALS,
    Call,
    PretrainGeneration,
    Refusal,
    Seams,
    arguments_of,
    first_refusal,
    in_a_block,
    of_data,
)
from checkpointless.integrations.megatron.pretraining import STEP, TRAIN, VALID
from checkpointless.system.patches import Patch


def pretrain(*args: Any, state: Mapping[str, Any] = MappingProxyType({}), **kwargs: Any) -> None:
    """Train as ``megatron.training.pretrain`` does, and resume from memory after a fault.

    Call it in a function that is wrapped with :class:`checkpointless.inprocess.HPWrapper`, and parse the arguments
    in that function, too: Megatron's globals are dropped between two entries. Outside of a wrapped function it is
    Megatron's own.

    Args:
        *args: those of Megatron's ``pretrain``.
        state: what the script itself changes from step to step, by name, as
            :class:`~checkpointless.PlainTraining` takes it. Outside of a wrapped function it is left alone.
        **kwargs: those of Megatron's ``pretrain``.

    Raises:
        ValueError: an object in ``state`` has no state, or one that cannot be kept.
        UnrecoverableError: an argument asks for what cannot be carried through a fault; or steps were committed and
            neither memory nor storage holds them any more.
    """
    call = active_call_wrapper()
    if call is None:
        training.pretrain(*args, **kwargs)
        return
    reason = refusal(vars(get_args()))
    if reason is not None:
        raise UnrecoverableError(reason)
    cleanup.install()
    _put_back_timestamps()
    with SEAMS.entered(PretrainGeneration(call, state)):
        training.pretrain(*args, **kwargs)


def _put_back_timestamps() -> None:
    """Let this process enter ``pretrain`` with the timestamps of its first entry, which each entry changes.

    A process that has entered it before would begin with a collective that a new one does not take part in.
    """
    timestamps = compat.startup_timestamps(training)
    if not _first_timestamps:
        _first_timestamps.update(timestamps)
    timestamps.update(_first_timestamps)


_first_timestamps: dict[str, float | None] = {}


class _MegatronLM:
    """Megatron-LM, as :class:`~checkpointless.integrations.megatron.pretraining.Trainer`.

    Its counters are arguments; of the iteration and the number of operations, which are variables of ``train``, the
    arguments have the values at its start.

    Attributes:
        first: the iterations that were over when training began.
        iteration: those that are over now.
        operations: the floating-point operations of these.
    """

    name = "Megatron-LM"
    takes_whole_batches = False

    def __init__(self) -> None:
        self._args = get_args()
        self.first: int | None = None
        self.iteration: int | None = None
        self.operations: float | None = None

    @property
    def seed(self) -> int:
        return int(self._args.seed)

    def has_checkpoint(self) -> bool:
        return bool(checkpoint_exists(self._args.load))

    def counters(self) -> dict[str, Any]:
        values = {name: getattr(self._args, name) for name in (TRAIN, VALID, "skipped_train_samples", *_VARIABLES)}
        values[STEP] = values.pop("iteration")
        values["first"] = self.first
        if self.iteration is not None:
            values[STEP] = self.iteration
        if self.operations is not None:
            values[_OPERATIONS] = self.operations
        return values

    def set_counters(self, values: Mapping[str, Any]) -> None:
        values = dict(values)
        self.first = values.pop("first", self.first)
        for name, value in values.items():
            setattr(self._args, "iteration" if name == STEP else name, value)

    def samples(self) -> int:
        return int(get_num_microbatches() * self._args.micro_batch_size * self._args.data_parallel_size)


_OPERATIONS = "num_floating_point_operations_so_far"
_VARIABLES = ("iteration", _OPERATIONS)


def _rows() -> tuple[list[Patch], list[Patch]]:
    required = [
        Patch(training, "get_megatron_optimizer", _get_optimizer, "has the model for which memory is asked"),
        Patch(training, "get_optimizer_param_scheduler", _get_scheduler, "gives their state back to what was made"),
        Patch(training, "load_checkpoint", _load_checkpoint, "storage is not asked for what memory had"),
        *of_data(training, "build_train_valid_test_data_iterators", training),
        Patch(training, "train", _train, "adds what happens when the loop ends"),
        Patch(training, "train_step", _train_step, "notes the outcome of a step, or gives it once more"),
        Patch(training, "training_log", _training_log, "has what was added up before a fault"),
        Patch(training, "checkpoint_and_decide_exit", _decide_exit, "has the number of operations"),
    ]
    return required, []


SEAMS = Seams("Megatron-LM", _rows)


@in_a_block
def _get_optimizer(generation: PretrainGeneration, call: Call) -> Any:
    generation.begin(_MegatronLM())
    generation.chunks = arguments_of(call)["model_chunks"]
    return call()


@in_a_block
def _get_scheduler(generation: PretrainGeneration, call: Call) -> Any:
    made = call()
    generation.recover(generation.chunks, (arguments_of(call)["optimizer"], made))
    return made


@in_a_block
def _load_checkpoint(generation: PretrainGeneration, call: Call) -> Any:
    return (0, 0) if generation.recovered else call()  # build_data sets both


@in_a_block
def _train(generation: PretrainGeneration, call: Call) -> Any:
    trainer = _trainer(generation)
    if trainer.first is None:
        trainer.first = trainer.counters()[STEP]
    result = call()
    if not generation.is_started:  # there was no step left
        generation.start()
    generation.end()
    return result


@in_a_block
def _train_step(generation: PretrainGeneration, call: Call) -> Any:
    arguments = arguments_of(call)
    if not generation.is_started:
        generation.start()
    _trainer(generation).iteration = arguments["iteration"]
    generation.begin_step(arguments["model"])
    return generation.train_step(call.func, arguments)


@in_a_block
def _training_log(generation: PretrainGeneration, call: Call) -> Any:
    arguments = arguments_of(call)
    generation.log(arguments["total_loss_dict"])
    # After the first iteration of an entry, what is added up is not reset: after that of the training, it is not.
    is_first = arguments["iteration"] - 1 == _trainer(generation).first
    return call(is_first_iteration=is_first)


@in_a_block
def _decide_exit(generation: PretrainGeneration, call: Call) -> Any:
    arguments = arguments_of(call)
    trainer = _trainer(generation)
    trainer.iteration, trainer.operations = arguments["iteration"], arguments[_OPERATIONS]
    return call()


def _trainer(generation: PretrainGeneration) -> _MegatronLM:
    assert isinstance(generation.trainer, _MegatronLM)
    return generation.trainer


_REFUSALS = (
    *REFUSALS,
    Refusal("full_validation", "does not know the pass of a whole validation"),
    Refusal("hybrid_context_parallel", "does not know the position of its data"),
    Refusal("phase_transition_iterations", "does not know the position in a phase", "None"),
    Refusal("perform_rl_step", "does not know the state of rollouts"),
    Refusal("skip_train", "recovers trainings only"),
    Refusal("moe_use_upcycling", "upcycles a model once only", "False, and --load to the upcycled checkpoint"),
    Refusal("run_workload_inspector_server", "cannot start its server twice"),
)


def refusal(arguments: Mapping[str, object]) -> str | None:
    """Return why a training with these arguments of Megatron-LM cannot be recovered exactly.

    Returns:
        One line that says what to set; None if there is no obstacle.
    """
    return first_refusal(_REFUSALS, arguments.get)
