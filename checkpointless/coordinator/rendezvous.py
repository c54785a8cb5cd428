"""Where the ranks of one generation meet: a separate store, and the environment variables that lead to it.

The store runs in the agent of a node and not with the coordinator, so the ranks do not notice if the coordinator is
lost.
"""

from __future__ import annotations

import uuid

from checkpointless.environment import (
    GROUP_RANK_ENV,
    GROUP_WORLD_SIZE_ENV,
    JOB_RESTART_COUNT_ENV,
    LOCAL_RANK_ENV,
    LOCAL_WORLD_SIZE_ENV,
    MASTER_ADDR_ENV,
    MASTER_PORT_ENV,
    NODE_RANK_ENV,
    RANK_ENV,
    ROLE_NAME_ENV,
    ROLE_RANK_ENV,
    ROLE_WORLD_SIZE_ENV,
    TORCHELASTIC_MAX_RESTARTS_ENV,
    TORCHELASTIC_RESTART_COUNT_ENV,
    TORCHELASTIC_RUN_ID_ENV,
    TORCHELASTIC_USE_AGENT_STORE_ENV,
    WORLD_SIZE_ENV,
)


class Rendezvous:
    """Where the ranks of the coming generation meet, and the environment variables that lead there.

    Args:
        nnodes: how many nodes there are.
        nproc: how many ranks each node runs.

    Attributes:
        run_id: the job's run ID.
        generation: the generation whose store was asked for last (-1: none).
        host: number of the node that was asked for that store (-1: none).
    """

    def __init__(self, nnodes: int, nproc: int) -> None:
        self.nnodes = nnodes
        self.nproc = nproc
        self.run_id = uuid.uuid4().hex
        self.generation = -1
        self.host = -1
        self._where: tuple[str, int] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the store is open."""
        return self._where is not None

    def ask(self, generation: int, host: int) -> None:
        """Note that node ``host`` is asked for the store of ``generation``; none is open until it says where."""
        self.generation, self.host, self._where = generation, host, None

    def opened(self, generation: int, host: int, address: str, port: int) -> bool:
        """Note that a node has opened a store.

        Returns:
            Whether it is the store that was asked for.
        """
        if (generation, host) != (self.generation, self.host):
            return False
        self._where = (address, port)
        return True

    def go_env(self) -> dict[str, str]:
        """Return the environment variables of a rank that change when the generation begins.

        Raises:
            RuntimeError: no store is open.
        """
        if self._where is None:
            raise RuntimeError(f"generation {self.generation} has no store")
        address, port = self._where
        return {
            MASTER_ADDR_ENV: address,
            MASTER_PORT_ENV: str(port),
            TORCHELASTIC_RESTART_COUNT_ENV: str(self.generation),
            JOB_RESTART_COUNT_ENV: str(self.generation),
        }

    def rank_env(self, rank: int, node: int) -> dict[str, str]:
        """Return all environment variables that a new rank needs to join the generation, named as by torchrun."""
        world_size = str(self.nnodes * self.nproc)
        return {
            RANK_ENV: str(rank),
            LOCAL_RANK_ENV: str(rank % self.nproc),
            ROLE_RANK_ENV: str(rank),
            WORLD_SIZE_ENV: world_size,
            LOCAL_WORLD_SIZE_ENV: str(self.nproc),
            ROLE_WORLD_SIZE_ENV: world_size,
            ROLE_NAME_ENV: "default",
            NODE_RANK_ENV: str(node),
            GROUP_RANK_ENV: str(node),
            GROUP_WORLD_SIZE_ENV: str(self.nnodes),
            TORCHELASTIC_RUN_ID_ENV: self.run_id,
            TORCHELASTIC_MAX_RESTARTS_ENV: "0",
            TORCHELASTIC_USE_AGENT_STORE_ENV: "True",
            **self.go_env(),
        }
