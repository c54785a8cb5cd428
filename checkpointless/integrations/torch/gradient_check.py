"""Gradients that a device computes wrongly, found before they are reduced and applied.

In every K-th step a pass is run again from the same streams, buffers and declared state, and the digests of its
gradients, as they arrive at parameters, are compared. A third run decides which of two was wrong; if it is the one
that was reduced, an error ends the step before its update, and recovery in place redoes it.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from checkpointless.inprocess import HPCallWrapper, UnrecoverableError
from checkpointless.inprocess.wrap import emit_event
from checkpointless.integrations.torch.repeated_steps import repeated_steps
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.state.module_tensors import TrainingTensors, is_sharded
from checkpointless.state.rank_local.declared import declared_state
from checkpointless.state.rng import RngStates
from checkpointless.state.serialization.digest import PendingDigests
from checkpointless.state.serialization.tensor_memory import tensor_bytes
from checkpointless.system.environment import GROUP_RANK_ENV, own_rank
from checkpointless.transfer.exchange import all_gather_json, true_on_all
from checkpointless.transfer.tensor_entry import Key

_Result = TypeVar("_Result")
_Digests = Mapping[tuple[str, int], int]  # by parameter, and which of its gradients
_Context = Callable[[], AbstractContextManager[None]]
_NOT_A_NUMBER = "sdc_check_every is a number of steps from 1 on (None: no checks), not {!r}"
_SHARDED = (
    "sdc_check_every compares gradients before they are reduced, which sharded parameters (FSDP2, DTensors) do not "
    "show: leave it out"
)
_NOT_CHECKED = (
    "sdc_check_every={} finds nothing to check in step {}: run the forward and backward pass of the step's last "
    "micro-batch in training.checked(...)"
)
_NOT_THE_SAME = (
    "three runs of the forward and backward pass of step {} give three gradients of {}: either kernels are not "
    "deterministic (set torch.use_deterministic_algorithms(True) and CUBLAS_WORKSPACE_CONFIG=:4096:8, or leave out "
    "sdc_check_every), or the pass is not the same each time, or this device cannot be trusted"
)
_is_trained = operator.attrgetter("requires_grad")
logger = logging.getLogger(__name__)


class CorruptedGradientError(RuntimeError):
    """The gradients of a step, which are reduced already, were computed wrongly; nothing was applied."""


class CorruptedSomewhereError(CorruptedGradientError):
    """Ranks of several nodes computed them wrongly, of which one may have given its error to the others."""


class GradientCheck:
    """Runs passes, and once more in every ``every``-th step (None: never) and in the first one of a generation.

    ``apart``: contexts in which a pass runs again, reduces nothing and leaves no gradients (None:
    :func:`unreduced`). ``keep`` takes what else a pass changes, and returns what puts it back. ``ValueError`` if
    parameters are sharded.
    """

    def __init__(
        self,
        every: int | None,
        state: TrainingTensors,
        call: HPCallWrapper,
        *,
        apart: Sequence[_Context] | None = None,
        keep: Callable[[], Callable[[], object]] = lambda: dict,
    ) -> None:
        if every is not None and (not isinstance(every, int) or every < 1):
            raise ValueError(_NOT_A_NUMBER.format(every))
        self._every = every
        self._state = state
        self._call = call
        self._apart = [functools.partial(unreduced, state)] if apart is None else apart
        self._keep = keep
        self._checked = -1  # the newest step that was
        named = [each for module in state.modules for each in module.named_parameters()]
        self._parameters = {id(parameter): (name, parameter) for name, parameter in named}
        if every is not None and any(is_sharded(parameter) for _, parameter in named):
            raise ValueError(_SHARDED)

    @property
    def is_due(self) -> bool:
        """Whether the step in the making is to be checked."""
        steps, every = self._call.steps, self._every
        return every is not None and (steps.making % every == 0 or steps.since_entry == 0)

    def require(self) -> None:
        """Refuse that a step is over which is to be checked and was not."""
        step = self._call.steps.making
        if self.is_due and self._checked != step:
            raise UnrecoverableError(_NOT_CHECKED.format(self._every, step))

    def run(self, compute: Callable[[], _Result], again: Callable[[], object] | None = None) -> _Result:
        """Run a pass, and return its result; if the step is checked (collective), ``again``, or ``compute``, too.

        Raises:
            CorruptedGradientError: the gradients that it has left are wrong.
            UnrecoverableError: they are others each time.
        """
        step = self._call.steps.making
        if not self.is_due:
            with self._announced(step):
                return compute()
        again, before = again or compute, _Place(self._state, self._keep)
        with self._announced(step), self._watched() as first:
            result = compute()
        after, self._checked = _Place(self._state, self._keep), step
        runs = [first.fetched(), self._again(again, before)]
        if not true_on_all(runs[0] == runs[1]):  # the pass may be collective
            runs.append(self._again(again, before))
        after.put_back()
        if len(runs) > 2:
            what = self._judge(step, *runs) if runs[0] != runs[1] else ""
            _raise_on_one(what, step)
        return result

    def _again(self, compute: Callable[[], object], before: _Place) -> _Digests:
        """Run the pass again, without reductions, and return its digests; gradients stay as they are."""
        before.put_back()
        with ExitStack() as stack:
            for each in (*self._apart, repeated_steps.paused):
                stack.enter_context(each())
            found = stack.enter_context(self._watched())
            compute()
        return found.fetched()

    def _judge(self, step: int, *runs: _Digests) -> str:
        """Return what was computed wrongly and is reduced; "": nothing of the step itself."""
        first, second, third = runs
        names = [key[0] for key in {**first, **second} if first.get(key) != second.get(key)]
        if third not in (first, second):
            raise UnrecoverableError(_NOT_THE_SAME.format(step, names[0]))
        is_reduced = third == second
        emit_event(EventName.CORRUPTED, step=step, parameter=names[0], parameters=len(names), redone=is_reduced)
        what = f"the gradient of {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        if is_reduced:
            return what
        logger.warning("%s was computed wrongly when step %d was checked; the step itself is right", what, step)
        return ""

    # --- what is seen of a pass ---------------------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[_Seen]:
        seen = _Seen()
        with ExitStack() as hooks:
            for name, each in self._parameters.values():
                if each.requires_grad:
                    hooks.enter_context(each.register_hook(functools.partial(seen.take, name)))
            yield seen

    @contextmanager
    def _announced(self, step: int) -> Iterator[None]:
        """Announce an output and a gradient to faults that are to be caused: those of a layer for each step."""
        trained = [each for _, each in self._parameters.values() if each.requires_grad]
        if self._call.faults is None or not trained:
            yield
            return
        parts = [part for module in self._state.modules for part in module.modules()]
        layers = [part for part in parts if any(map(_is_trained, part.parameters(recurse=False)))]
        output = _Damage(self._call, "activation", step, _largest)
        gradient = _Damage(self._call, "gradient", step, torch.Tensor.contiguous)
        with ExitStack() as hooks:
            for layer in layers[step % len(layers) :]:
                hooks.enter_context(layer.register_forward_hook(output.of_layer))
            hooks.enter_context(trained[step % len(trained)].register_hook(gradient.of_tensor))
            yield


class _Damage:
    """Announces a phase of ``step`` for the first tensor that comes, of which a fault changes a part of a copy."""

    def __init__(
        self, call: HPCallWrapper, phase: str, step: int, part: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._call, self._phase, self._step, self._part = call, phase, step, part
        self._has_come = False

    def of_tensor(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if self._has_come:
            return None
        self._has_come, copies = True, []

        def target() -> torch.Tensor:
            copies.append(tensor.clone(memory_format=torch.contiguous_format))
            return self._part(copies[0].detach())

        self._call.enter_phase(self._phase, self._step, target)
        return copies[0] if copies else None

    def of_layer(self, layer: torch.nn.Module, given: object, output: Any) -> Any:
        """Return what is to take the place of a layer's output, of which the first may be meant; None: it stays."""
        if not isinstance(output, tuple):
            return self.of_tensor(output)
        first = self.of_tensor(output[0])
        return (first, *output[1:]) if first is not None else None


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the byte of the largest element whose lowest bit changes it by less than a hundredth."""
    flat, nbytes = tensor.view(-1), tensor.element_size()
    at = int(flat.abs().argmax()) * nbytes + max(nbytes - 2, 0)
    return flat.view(torch.uint8)[at : at + 1]


def _raise_on_one(what: str, step: int) -> None:
    """Raise on the first of the ranks on which ``what`` was wrong, since peers may have its error. Collective."""
    mine = int(os.environ.get(GROUP_RANK_ENV, "0")) if what else None
    wrong = [(rank, node) for rank, node in enumerate(all_gather_json(mine)) if node is not None]
    if wrong and wrong[0][0] == own_rank():
        kind = CorruptedGradientError if len({node for _, node in wrong}) == 1 else CorruptedSomewhereError
        raise kind(f"{what} was computed wrongly in step {step}, which is redone")


class _Place:
    """Where a pass begins or has ended: what it changes, and whether DDP is to send buffers."""

    def __init__(self, state: TrainingTensors, keep: Callable[[], Callable[[], object]]) -> None:
        self._state = state
        self._declared, self._put_more = declared_state.take(), keep()
        self._streams = RngStates.capture()
        self._buffers: Mapping[Key, torch.Tensor] = state.buffers.take()
        self._syncs = [wrapper.require_forward_param_sync for wrapper in state.wrappers]

    def put_back(self) -> None:
        self._streams.restore()
        self._state.buffers.put(self._buffers)
        for wrapper, syncs in zip(self._state.wrappers, self._syncs):
            wrapper.require_forward_param_sync = syncs
        if declared_state.take() != self._declared:
            declared_state.put(self._declared)
        self._put_more()


@contextmanager
def unreduced(state: TrainingTensors) -> Iterator[None]:
    """Have backward passes in the context neither reduce gradients nor leave them, in torch and its DDP."""
    trained = [each for module in state.modules for each in module.parameters() if each.requires_grad]
    gradients = [parameter.grad for parameter in trained]
    hooks = [parameter.register_post_accumulate_grad_hook(_drop) for parameter in trained]
    for parameter in trained:
        parameter.grad = None
    try:
        with ExitStack() as stack:
            for wrapper in state.wrappers:
                stack.enter_context(wrapper.no_sync())
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, gradient in zip(trained, gradients):
            parameter.grad = gradient


class _Seen:
    """The digests of the gradients of a pass, in the order in which they come."""

    def __init__(self) -> None:
        self._keys: list[tuple[str, int]] = []
        self._digests = PendingDigests()
        self._counts: Counter[str] = Counter()

    def take(self, name: str, gradient: torch.Tensor) -> None:
        """Digest a gradient of the parameter, without waiting for its device."""
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        self._counts[name] += 1
        self._keys.append((name, self._counts[name]))
        self._digests.add(tensor_bytes(gradient))

    def fetched(self) -> _Digests:
        return dict(zip(self._keys, self._digests.fetch(), strict=True))


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None
