"""Recovery for a hand-written training loop: any modules, any ``torch.optim`` optimizer, no framework."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from checkpointless.inprocess import HPCallWrapper, UnrecoverableError
from checkpointless.kernels import unabortable
from checkpointless.precision import unsupported_in_a_loop
from checkpointless.recovery.guard import guarded_update
from checkpointless.recovery.manager import CheckpointManager
from checkpointless.recovery.moment import Moment, Stage
from checkpointless.recovery.running import manager_of
from checkpointless.serialization.checksum import digest_buffers, digest_parameters
from checkpointless.telemetry.steps import StepExtras, StepLog
from checkpointless.transfer.module_tensors import TrainingTensors
from checkpointless.transfer.sharded_tensors import replicas_of
from checkpointless.transfer.tensor_entry import Key

logger = logging.getLogger(__name__)


class PlainTraining(TrainingTensors):
    """Modules, optimizers and schedulers of a hand-written training loop, for
    :class:`~checkpointless.recovery.CheckpointManager`.

    Inside a function wrapped with :class:`checkpointless.inprocess.HPWrapper`::

        training = PlainTraining(caller, [model], [optimizer])
        for step in training.steps(1000):
            loss = model(batch_of(step)).mean()
            loss.backward()            # and the gradients' all-reduce
            training.update()          # in place of optimizer.step() and optimizer.zero_grad()

    A batch must follow from the step's number and the random streams; each rank gets its own streams back after a
    fault. If the batch comes from a ``DataLoader`` whose workers draw random numbers, pass the loader to
    :func:`~checkpointless.recovery.seed_data_workers` and give it a separate ``generator``. Otherwise each iterator
    draws a number from the training's stream, and after a fault there is one iterator more. Gradients must be final
    (reduced and clipped) when :meth:`update` is called. Of the phases of fault specs, ``before_optimizer`` to
    ``between`` and ``recovery`` are announced.

    Args:
        call: the running wrapper. Its ``checkpoint_manager`` is used; if there is none, one is made.
        modules: the modules that are trained.
        optimizers: the optimizers of the modules.
        schedulers: the learning-rate schedulers, which step with every update.
        group: the global ranks that hold the same modules and optimizers. Default: what the meshes of the modules'
            DTensors say (FSDP2, HSDP, tensor parallelism by a plan), else all ranks (data parallel).

    Raises:
        UnrecoverableError: the modules cannot be recovered.
        ValueError: this rank is in no mesh of a parameter.
    """

    def __init__(
        self,
        call: HPCallWrapper,
        modules: Iterable[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        schedulers: Sequence[Any] = (),
        group: Sequence[int] | None = None,
    ) -> None:
        modules = list(modules)
        parts = [part for module in modules for part in module.modules()]
        reason = unsupported_in_a_loop(parts)
        for part in parts:
            reason = reason or unabortable(getattr(part, "config", None))
        if reason is not None:
            raise UnrecoverableError(reason)
        super().__init__(modules, optimizers)
        # As they are now: while FSDP2 computes, whole parameters are in the places of the divided ones.
        self._named = {id(module): list(module.named_parameters()) for module in modules}
        self.step = 0
        self._optimizers = list(optimizers)
        self._schedulers = list(schedulers)
        self._group = tuple(sorted(group)) if group is not None else self._replicas()
        self._call = call
        self._ready_step = 0
        self._moments: dict[int, Moment] = {}  # by step
        self._ready_buffers: Mapping[Key, torch.Tensor] = {}  # those of the step in the making, before its update
        manager = manager_of(call)
        if manager is None:
            call.checkpoint_manager = manager = CheckpointManager()
        self._manager = manager
        if len(self._group) == 1 < dist.get_world_size() and not manager.tiers and dist.get_rank() == 0:
            logger.warning(
                "no two ranks hold the same part of the model: a rank that dies cannot be restored from memory. "
                "A mesh with a dimension of replicas (HSDP) helps, or CheckpointManager(tiers=[NeighborMemory()])"
            )
        self._log = StepLog.from_environment()
        if call.faults is not None:
            call.faults.target = lambda: next(iter(self.shard().values()))

    def _replicas(self) -> tuple[int, ...]:
        """Return the ranks that hold the same as this one, as far as the parameters tell."""
        parameters = [parameter for named in self._named.values() for _, parameter in named]
        return replicas_of(parameters, dist.get_rank()) or tuple(range(dist.get_world_size()))

    @override
    def parameters_of(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters that the module had when the training began, with their names."""
        return iter(self._named[id(module)])

    def steps(self, last: int) -> Iterable[int]:
        """Yield the optimizer steps to make, from the first that is not committed to ``last``.

        If this is a restart, the state is recovered before the first of them.

        Raises:
            UnrecoverableError: steps were committed and no rank holds them any more.
            RuntimeError: a step ended without :meth:`update`.
        """
        self._restore()
        while self.step < last:
            moment = self._moment(self.step)
            self._manager.keep_buffers(self.step, Stage.COMMITTED, moment.buffers)
            self._moments = {self.step: moment}
            self._manager.make_copies(self.step)  # with what the loop has done since the update
            self._call.begin_step(self.step + 1)
            yield self.step + 1
            if self.step < self._call.steps.making:
                raise RuntimeError(f"step {self._call.steps.making} ended without a call of update()")
            self._call.end_step()
            self._call.enter_phase("between", self.step)
        self._manager.finish_copies()

    def update(self, loss: float | None = None) -> None:
        """Apply the gradients, on all ranks or on none, and clear them.

        Args:
            loss: the loss of the step, which is kept with the step if steps are recorded.
        """
        self._call.steps.loss = loss
        guarded_update(
            self._call.steps.making,
            self.apply_held_update,
            lock=self._call.parameter_update_lock,
            ready=self._ready,
            committed=self._call.committed,
            phase=self._call.enter_phase,
        )
        self.step = self._call.steps.making
        self._record(loss)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _record(self, loss: float | None) -> None:
        """Record the committed step, if that is requested (``--record-steps``) and the loss is known."""
        if self._log is not None and loss is not None:
            rates = [group.get("lr", 0.0) for optimizer in self._optimizers for group in optimizer.param_groups]
            extras = StepExtras(buffers=digest_buffers(self.modules), lr=tuple(float(rate).hex() for rate in rates))
            self._log.record(self.step, loss, digest_parameters(self.modules), extras)

    def _ready(self, step: int) -> None:
        self._call.enter_phase("before_optimizer", step)
        self._ready_buffers = self.copy_buffers()
        self._ready_step = step
        self._manager.keep_buffers(step, Stage.COMMITTED, self._ready_buffers)
        self._manager.store_rng_states(step, loss=self._call.steps.loss)
        self._manager.replicate_rng_states(step)
        self._call.parameter_update_lock.mark_ready(step)

    def _restore(self) -> None:
        call, manager = self._call, self._manager
        objects: dict[str, Any] | None = None
        if call.generation > 0:
            call.enter_phase("recovery", call.high_water)
            objects = manager.recover(self)
            if objects is None and call.high_water > 0:
                reason = manager.refusal or "no rank holds the state in memory"
                if not manager.allow_restart_from_scratch:
                    raise UnrecoverableError(reason)
                logger.error("%s: starting over at step 0, as allow_restart_from_scratch allows", reason)
            self.step = objects["step"] if objects is not None else 0
            states = manager.rng_of(self.step)
            if self._log is not None and states is not None and (self._log.last_step() or 0) < self.step:
                self._record(states.loss)  # committed, but the fault came before it was recorded
        if objects is None:
            manager.begin_buffers(self)
        if call.generation == 0:
            manager.keep_buffers(0, Stage.COMMITTED, self.copy_buffers())
            manager.store_rng_states(0)
        manager.restore_streams()
        manager.attach(self, self.step)
        call.steps.begin_data()

    # --- what the manager asks for (checkpointless.recovery.live_state.LiveState) ---------------------------------

    def group(self) -> tuple[int, ...]:
        """Return the global ranks that hold the same state."""
        return self._group

    def moments(self, step: int) -> Mapping[Stage, Moment]:
        """Return the state after the update of ``step``; what the loop does after ``update()`` is not in it."""
        return {Stage.COMMITTED: self._moments[step]} if step in self._moments else {}

    def own_buffers(self, step: int) -> Mapping[Stage, Mapping[Key, torch.Tensor]]:
        """Return the buffers after ``step``; if its update has failed or is to come, those before the update."""
        if step in self._moments:
            return {Stage.COMMITTED: self._moments[step].buffers}
        return {Stage.COMMITTED: self._ready_buffers} if step == self._ready_step > 0 else {}

    def own_parts(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return nothing, because a batch follows from the step and the streams."""
        return {}

    def resumed(self, step: int, stage: Stage, objects: dict[str, Any]) -> None:
        """Record that the state is that after ``step``."""
        self._moments = {step: Moment(objects, self.copy_buffers())}

    def _moment(self, step: int) -> Moment:
        """Return the state as it is now, as the moment after ``step``."""
        objects = {
            "step": step,
            "groups": self.groups(),
            "state": self.plain_state(),
            "schedulers": [copy.deepcopy(scheduler.state_dict()) for scheduler in self._schedulers],
        }
        return Moment(objects, self.copy_buffers())

    @override
    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Put back the objects of a moment."""
        super().load_objects(objects)
        for scheduler, state in zip(self._schedulers, objects["schedulers"]):
            scheduler.load_state_dict(dict(state))

    def apply_held_update(self) -> None:
        """Make one step of every optimizer and scheduler."""
        for optimizer in self._optimizers:
            optimizer.step()
        for scheduler in self._schedulers:
            scheduler.step()
        self._moments = {self._ready_step: self._moment(self._ready_step)}

    def derive(self) -> None:
        """Do nothing: every rank of the group holds everything, so nothing follows from other ranks' shards."""
