"""A rank's side: how its process talks to whatever regroups it, under every launcher.

A rank talks to our agent through an :class:`AgentClient`. A rank that another launcher started talks to a store or
to SageMaker HyperPod's agent, or is alone (:class:`StandaloneClient`).
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os

from checkpointless.launcher.client.agent_client import (
    AgentClient,
    AgentLostError,
    RankClient,
    RankUnknownError,
    StandaloneClient,
)
from checkpointless.launcher.protocol.messages import FaultNotice
from checkpointless.system.environment import (
    HYPERPOD_SOCKET_ENV,
    MASTER_ADDR_ENV,
    MASTER_PORT_ENV,
    RANK_ENV,
    SLURM_PROCID_ENV,
    WORLD_SIZE_ENV,
    own_run_dir,
)

logger = logging.getLogger(__name__)

__all__ = [
    "AgentClient",
    "AgentLostError",
    "FaultNotice",
    "HPAgentK8sAPIFactory",
    "RankClient",
    "StandaloneClient",
    "wait_rank",
]


_RANK_VARIABLES = (RANK_ENV, WORLD_SIZE_ENV)
_STORE_VARIABLES = (*_RANK_VARIABLES, MASTER_ADDR_ENV, MASTER_PORT_ENV)

_of_other_launcher: RankClient | None = None


class HPAgentK8sAPIFactory:
    """Makes the client for the agent that started this process, whichever agent that is.

    The name comes from the reference API; nothing here is about Kubernetes. Under SageMaker HyperPod's agent the
    client is a :class:`~checkpointless.launcher.client.hyperpod.HyperPodClient`.
    """

    def __call__(self) -> RankClient:
        """Return this process's client, the same one at every call.

        Raises:
            RankUnknownError: this process does not know its rank.
            RuntimeError: the client for this process's agent cannot be used.
        """
        global _of_other_launcher
        client = AgentClient.from_environment()
        if client is not None:
            return client
        if _of_other_launcher is None:
            _make_run_dir()
            _of_other_launcher = _make_for_other_launcher()
            # A thread that is inside c10d while the interpreter exits would end the process with SIGABRT.
            atexit.register(_of_other_launcher.close)
            other = _of_other_launcher
            if other.has_launcher and other.rank == 0 and not os.environ.get(HYPERPOD_SOCKET_ENV):
                logger.warning(
                    "this launcher does not respawn ranks or look for hangs (`checkpointless run` does): "
                    "exceptions are recovered in place, but a lost process ends the job"
                )
        return _of_other_launcher


def _make_run_dir() -> None:
    """Create the directory that ``CHECKPOINTLESS_RUN_DIR`` names, as our agent would have done."""
    run_dir = own_run_dir()
    if run_dir is not None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning("the run directory %s cannot be made, so events are not recorded: %s", run_dir, error)


def _make_for_other_launcher() -> RankClient:
    if os.environ.get(HYPERPOD_SOCKET_ENV):
        from checkpointless.launcher.client.hyperpod import HyperPodClient

        return HyperPodClient()
    if int(os.environ.get(WORLD_SIZE_ENV) or "1") == 1:
        has_launcher = any(os.environ.get(name) for name in (RANK_ENV, WORLD_SIZE_ENV, SLURM_PROCID_ENV))
        if not has_launcher:
            logger.warning(
                "this process has no launcher, so it recovers from nothing: start this script with "
                "`checkpointless run` or with torchrun"
            )
        return StandaloneClient(has_launcher)
    _check_ranks(_STORE_VARIABLES)
    from checkpointless.launcher.client.store_client import (
        StoreClient,  # needs torch, which a rank under our agent may lack
    )

    return StoreClient.from_environment()


def wait_rank() -> None:
    """Ensure that this process knows its rank before anything distributed starts.

    Under our agent, torchrun and similar launchers, ``RANK`` and ``WORLD_SIZE`` are in the environment when the
    process starts, so this function only checks them. Under SageMaker HyperPod it asks the agent for them and waits
    for the answer, which may not come before a node has been replaced; a connection that closes ends the wait. It
    does nothing in a child process of the rank (a data-loader worker, say).

    Raises:
        RankUnknownError: (an ``AssertionError``) a variable is missing or not a number, the rank is not below the
            world size, or SageMaker HyperPod's agent does not give them.
    """
    if multiprocessing.parent_process() is not None:
        return
    if os.environ.get(HYPERPOD_SOCKET_ENV) and AgentClient.from_environment() is None:
        from checkpointless.launcher.client.hyperpod import HyperPodClient

        client = HPAgentK8sAPIFactory()()
        if isinstance(client, HyperPodClient):
            client.wait_rank()
            return  # checked again at the start of a generation: a spare may have no rank before
    _check_ranks(_RANK_VARIABLES)


def _check_ranks(names: tuple[str, ...]) -> None:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise RankUnknownError(
            f"{', '.join(missing)} not set: start this script with `checkpointless run` or with torchrun"
        )
    try:
        rank, world_size = int(os.environ[RANK_ENV]), int(os.environ[WORLD_SIZE_ENV])
    except ValueError as error:
        raise RankUnknownError(f"RANK and WORLD_SIZE must be whole numbers: {error}") from error
    if not 0 <= rank < world_size:
        raise RankUnknownError(f"RANK={rank} is not below WORLD_SIZE={world_size}")
