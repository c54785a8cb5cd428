"""Have the processes that serve the queues of Megatron's writers import nothing: each rank that saves starts one.

Such a process is an interpreter of its own, which imports the script, and torch for what a writer has to say: 2.5 s
of a core for each rank that saves, in which it does nothing that a test looks at. It stays a process of its own.
"""

import pickle
from multiprocessing import spawn
from typing import Any

_MANAGER = "SyncManager"  # in the name of its process


class SealedQueue:
    """Hands on what it is given as bytes, which the process in between need not understand."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, value: object) -> None:
        self._queue.put(pickle.dumps(value))

    def get_nowait(self) -> Any:
        return pickle.loads(self._queue.get_nowait())


def install() -> None:
    """Let this process, and those that it forks, start managers without the script, and seal what goes through."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    prepared, made = spawn.get_preparation_data, filesystem_async._get_write_results_queue

    def without_script(name: str) -> dict[str, Any]:
        data = prepared(name)
        return {key: value for key, value in data.items() if not (_MANAGER in name and key.startswith("init_main"))}

    spawn.get_preparation_data = without_script
    filesystem_async._get_write_results_queue = lambda: SealedQueue(made())
