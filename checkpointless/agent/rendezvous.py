"""What the ranks of one generation meet at: a store of their own, and the environment that leads there.

The store lives in the agent of a node and not with the coordinator: the ranks do not notice if that is lost.
"""

from __future__ import annotations

import socket
import uuid

from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


class GenerationStore:
    """A c10d store that lives in the agent, for one generation.

    It is bound to one address, on a free port. Closing it frees every rank that waits for a key in it.

    Args:
        generation: whose store it is.
        address: of this node, a number, as the others reach it.

    Raises:
        OSError, RuntimeError: it cannot be opened.
    """

    def __init__(self, generation: int, address: str = LOOPBACK) -> None:
        self.generation = generation
        self.address = address
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.bind((address, 0))
        listener.listen(1024)
        self.port: int = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store owns it from here on
            use_libuv=True,
        )

    def close(self) -> None:
        """Stop serving and drop every connection."""
        self._store = None


def resolve(address: str) -> str:
    """The number of an address; a name is looked up.

    Raises:
        OSError: it cannot be.
    """
    return str(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0])


class Rendezvous:
    """Where the ranks of the coming generation meet, and the environment that leads there.

    Args:
        nnodes: how many nodes there are.
        nproc: how many ranks on each.

    Attributes:
        run_id: of the job.
        generation: whose store was asked for last (-1: none).
        host: the number of the node that was asked.
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
        """Whether the store is there."""
        return self._where is not None

    def ask(self, generation: int, host: int) -> None:
        """A node is asked for the store of ``generation``; there is none until it says where."""
        self.generation, self.host, self._where = generation, host, None

    def opened(self, generation: int, host: int, address: str, port: int) -> bool:
        """A node has a store.

        Returns:
            Whether it is the one that was asked for.
        """
        if (generation, host) != (self.generation, self.host):
            return False
        self._where = (address, port)
        return True

    def go_env(self) -> dict[str, str]:
        """What changes in a rank's environment when the generation begins.

        Raises:
            RuntimeError: there is no store.
        """
        if self._where is None:
            raise RuntimeError(f"generation {self.generation} has no store")
        address, port = self._where
        return {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(self.generation),
            "JOB_RESTART_COUNT": str(self.generation),
        }

    def rank_env(self, rank: int, node: int) -> dict[str, str]:
        """All that a new rank needs to know to join the generation, as torchrun says it."""
        world_size = str(self.nnodes * self.nproc)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.nproc),
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "ROLE_WORLD_SIZE": world_size,
            "ROLE_NAME": "default",
            "NODE_RANK": str(node),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(self.nnodes),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **self.go_env(),
        }
