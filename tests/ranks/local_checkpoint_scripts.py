"""Scripts as users of NVRx's local checkpoints write them after its documentation; nothing but imports is ours.

Each is run twice, with NVRx's classes and with ours. NVRx's queue of background saves is used both times. NVRx's
``BasicTensorAwareStateDict`` takes tensors on GPUs only, so on the CPU a script has a class of its own, as its
documentation says.
"""

import shutil
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

OURS, THEIRS = "checkpointless.replication.local_checkpoint", "nvidia_resiliency_ext.checkpointing.local"
#: Where a script imports from: the manager, the class of the state and the strategies.
MODULES = {
    "ours": (OURS, OURS, OURS),
    "nvrx": (
        f"{THEIRS}.ckpt_managers.local_manager",
        f"{THEIRS}.basic_state_dict",
        f"{THEIRS}.replication.strategies",
    ),
}


def imported(whose: str) -> SimpleNamespace:
    """Return what a script imports; of NVRx's, the class of the state is made fit for the CPU."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

    managers, states, strategies = map(import_module, MODULES[whose])
    state = states.BasicTensorAwareStateDict
    return SimpleNamespace(
        Manager=managers.LocalCheckpointManager,
        State=state if whose == "ours" else _on_the_cpu(state),
        Lazy=strategies.LazyCliqueReplicationStrategy,
        Clique=strategies.CliqueReplicationStrategy,
        Queue=AsyncCallsQueue,
    )


def _on_the_cpu(theirs: type[Any]) -> type[Any]:
    class HostState(theirs):  # type: ignore[misc]
        def __init__(self, state_dict: dict[str, Any]) -> None:
            self.state_dict = state_dict
            self._is_hollow = False

        def restore_tensor_device(self, non_blocking: bool = True) -> None:
            """Do nothing: the tensors are where they belong."""

        def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
            """Copy the tensors, because training goes on with them."""
            tensors = [tensor.clone() for tensor in self.pop_tensors()]
            self.insert_tensors(tensors)

    HostState.__qualname__ = "HostState"
    globals()["HostState"] = HostState
    return HostState


class Script:
    """A script's training: a model whose weights say which rank trained them, and how often."""

    def __init__(
        self, names: SimpleNamespace, root: Path, session: str, replication: list[int] | None, is_lazy: bool
    ) -> None:
        self.names, self.rank = names, dist.get_rank()
        self.folder = root / f"node{self.rank // 2}"
        self.folder.mkdir(exist_ok=True, mode=0o700, parents=True)
        strategy = None
        if replication is not None:
            make = names.Lazy if is_lazy else names.Clique.from_replication_params
            strategy = make(*replication)
        self.manager = names.Manager(self.folder, session_id=session, repl_strategy=strategy)
        self.queue = names.Queue(persistent=False)
        self.weights = torch.full((257, 3), float(self.rank))
        self.optimizer = [{"exp_avg": torch.full((5,), 0.5 + self.rank)}]
        self.iteration = 0

    def resume(self) -> int:
        found = int(self.manager.find_latest())
        if found != -1:
            state, _ = self.manager.load()
            plain = state.state_dict
            self.weights, self.optimizer = plain["weights"], plain["optimizer"]
            self.iteration = plain["iteration"]
        return found

    def train(self, steps: int, every: int, is_async: bool) -> None:
        for _ in range(steps):
            self.iteration += 1
            self.weights += 1
            self.optimizer[0]["exp_avg"] *= 2
            if self.iteration % every == 0:
                state = {"weights": self.weights, "optimizer": self.optimizer, "iteration": self.iteration}
                request = self.manager.save(self.names.State(_nested_copy(state)), self.iteration, is_async)
                assert (request is not None) is is_async
                if request is not None:
                    self.queue.schedule_async_request(request)
            self.queue.maybe_finalize_async_calls(blocking=False)
        self.queue.maybe_finalize_async_calls(blocking=True)
        self.queue.close()

    def told(self) -> list[Any]:
        exp_avg = self.optimizer[0]["exp_avg"]
        return [self.iteration, self.weights.unique().tolist(), exp_avg.unique().tolist(), str(self.weights.dtype)]


def _nested_copy(state: Any) -> Any:
    """Return the same tensors in new dicts and lists: NVRx's classes change those that they are given."""
    if isinstance(state, dict):
        return {key: _nested_copy(value) for key, value in state.items()}
    return [_nested_copy(value) for value in state] if isinstance(state, list) else state


def play(
    whose: str,
    root: str,
    is_async: bool = False,
    replication: list[int] | None = None,
    is_lazy: bool = True,
    lost: str = "",
    resumes: list[str] | None = None,
) -> list[Any]:
    """Train in session "one", lose a node's directory, and resume in some sessions. Return what each resumption
    found, and where the training is six steps later.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    names = imported(whose)

    def script(session: str) -> Script:
        return Script(names, Path(root), session, replication, is_lazy)

    first = script("one")
    assert first.resume() == -1
    first.train(7, every=3, is_async=is_async)
    dist.barrier()
    if lost and dist.get_rank() == 0:
        shutil.rmtree(Path(root) / lost)
    dist.barrier()
    outcomes: list[Any] = [first.told()]
    for session in resumes or ["one"]:
        again = script(session)
        outcomes.append(_attempted(again))
        dist.barrier()
    return outcomes


def _attempted(script: Script) -> Any:
    found = script.resume()
    script.train(6, every=3, is_async=False)
    told: Callable[[], list[Any]] = script.told
    return [found, told()]
