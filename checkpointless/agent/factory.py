"""How a rank finds who regroups it and which rank it is, whichever launcher started it."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os

from checkpointless.agent.client import AgentClient, RankClient
from checkpointless.agent.standalone import StandaloneClient

logger = logging.getLogger(__name__)

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_agentless: RankClient | None = None


class HPAgentK8sAPIFactory:
    """Makes the client of the agent that started this process, whichever it is.

    (The name is the reference API's; nothing in it is about Kubernetes.)
    """

    def __call__(self) -> RankClient:
        """This process's client; the same one at every call."""
        global _agentless
        client = AgentClient.from_environment()
        if client is not None:
            return client
        if _agentless is None:
            _agentless = _make_agentless()
            # A thread that is inside c10d while the interpreter ends would end the process by SIGABRT.
            atexit.register(_agentless.close)
            if _agentless.rank == 0:
                logger.warning(
                    "this launcher does not respawn ranks or look for hangs (`checkpointless run` does): "
                    "exceptions are recovered from in place, but the job ends if a process does"
                )
        return _agentless


def _make_agentless() -> RankClient:
    if int(os.environ.get("WORLD_SIZE") or "1") == 1:
        return StandaloneClient()
    wait_rank()
    from checkpointless.agent.store_client import StoreClient  # needs torch, which a rank of ours may not

    return StoreClient.from_environment()


def wait_rank() -> None:
    """See that this process knows its rank before anything distributed starts.

    Under our agent, torchrun and the like the ranks are in the environment when the process starts, so this only
    checks them. Does nothing in a child process of the rank (a data-loader worker, say).

    Raises:
        RuntimeError: a variable is missing or no number, or the rank is not below the world size.
    """
    if multiprocessing.parent_process() is not None:
        return
    missing = [name for name in _RANK_VARIABLES if not os.environ.get(name)]
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)} not set: start this script with `checkpointless run` or with torchrun"
        )
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise RuntimeError(f"RANK and WORLD_SIZE must be whole numbers: {error}") from error
    if not 0 <= rank < world_size:
        raise RuntimeError(f"RANK={rank} is not below WORLD_SIZE={world_size}")
