"""Megatron-LM's ``pretrain`` of Megatron-core 0.19's wheel, which recovers from faults inside a block."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, training
from megatron.training.checkpointing import checkpoint_exists
from typing_extensions import override

from checkpointless.inprocess import HPCallWrapper, UnrecoverableError, active_call_wrapper
from checkpointless.integrations.compat.megatron import STARTUP_TIMESTAMPS
from checkpointless.integrations.megatron import cleanup
from checkpointless.integrations.megatron.pretraining import (
    REFUSALS,
    STEP,
    TRAIN,
    VALID,
    Call,
    PretrainGeneration,
    Refusal,
    Seam,
)
from checkpointless.system.patches import Patches


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
    reason = _MegatronLM.refusal(vars(get_args()).get)
    if reason is not None:
        raise UnrecoverableError(reason)
    cleanup.install()
    _put_back_timestamps()
    with _MegatronLM(call, state).entered():
        training.pretrain(*args, **kwargs)


def _put_back_timestamps() -> None:
    """Put back the timestamps of the first entry; without, a collective would lack new processes."""
    timestamps = getattr(training, STARTUP_TIMESTAMPS)
    timestamps.update(_first_timestamps or timestamps)
    _first_timestamps.update(timestamps)


_first_timestamps: dict[str, float | None] = {}


_OPERATIONS = "num_floating_point_operations_so_far"
_VARIABLES = ("iteration", _OPERATIONS)


class _MegatronLM(PretrainGeneration):
    """An entry of Megatron-LM's ``pretrain``. Counters are arguments, two of them only when ``train`` starts."""

    name = "Megatron-LM"
    patches = Patches()
    refusals = (
        *REFUSALS,
        Refusal("full_validation", "does not know the pass of a whole validation"),
        Refusal("hybrid_context_parallel", "does not know the position of its data"),
        Refusal("phase_transition_iterations", "does not know the position in a phase", "None"),
        Refusal("perform_rl_step", "does not know the state of rollouts"),
        Refusal("skip_train", "recovers trainings only"),
        Refusal("moe_use_upcycling", "upcycles a model once only", "False, and --load to the upcycled checkpoint"),
        Refusal("run_workload_inspector_server", "cannot start its server twice"),
    )

    def __init__(self, call: HPCallWrapper, declared: Mapping[str, Any]) -> None:
        super().__init__(call, declared)
        self._first: int | None = None  # the iterations that were over when training began
        self._variables: dict[str, Any] = {}  # those of ``train``, as far as they are known

    @classmethod
    @override
    def seams(cls) -> list[Seam]:
        return [
            (training, "get_megatron_optimizer", cls._get_optimizer, "has the model for which memory is asked"),
            (training, "get_optimizer_param_scheduler", cls._get_scheduler, "gives their state to what was made"),
            (training, "load_checkpoint", cls._load_checkpoint, "storage is not asked for what memory had"),
            *cls.seams_of_data(training, "build_train_valid_test_data_iterators", training),
            (training, "train", cls._train, "adds what happens when the loop ends"),
            (training, "train_step", cls._train_step, "notes the outcome of a step, or gives it once more"),
            (training, "training_log", cls._training_log, "has what was added up before a fault"),
            (training, "checkpoint_and_decide_exit", cls._decide_exit, "has the number of operations"),
        ]

    @property
    @override
    def seed(self) -> int:
        return int(self._args.seed)

    @override
    def has_checkpoint(self) -> bool:
        return bool(checkpoint_exists(self._args.load))

    @override
    def counters(self) -> dict[str, Any]:
        names = (TRAIN, VALID, "skipped_train_samples", *_VARIABLES)
        values = {name: getattr(self._args, name) for name in names} | self._variables
        return {STEP: values.pop("iteration"), "first": self._first, **values}

    @override
    def set_counters(self, values: Mapping[str, Any]) -> None:
        self._first = values.get("first", self._first)
        for name in values.keys() - {"first"}:
            setattr(self._args, "iteration" if name == STEP else name, values[name])

    @override
    def samples(self) -> int:
        return int(get_num_microbatches() * self._args.micro_batch_size * self._args.data_parallel_size)

    def _get_optimizer(self, call: Call) -> Any:
        self.begin()
        self._args: Any = get_args()
        self._chunks = call.arguments["model_chunks"]
        return call()

    def _get_scheduler(self, call: Call) -> Any:
        made = call()
        self.recover(self._chunks, call.arguments["optimizer"], made)
        return made

    def _load_checkpoint(self, call: Call) -> Any:
        return (0, 0) if self.recovered else call()  # build_data sets both

    def _train(self, call: Call) -> Any:
        if self._first is None:
            self._first = self.counters()[STEP]
        result = call()
        self.training.start()  # if there was no step left
        self.training.end()
        return result

    def _train_step(self, call: Call) -> Any:
        self.training.start()
        self._variables["iteration"] = call.arguments["iteration"]
        self.training.begin_step()
        return self.train_step(call)

    def _training_log(self, call: Call) -> Any:
        arguments = call.arguments
        self.training.log(arguments["total_loss_dict"])
        # Megatron resets what is added up behind each first iteration but that of an entry: that of the training.
        return call(is_first_iteration=arguments["iteration"] - 1 == self._first)

    def _decide_exit(self, call: Call) -> Any:
        self._variables = {name: call.arguments[name] for name in _VARIABLES}
        return call()
