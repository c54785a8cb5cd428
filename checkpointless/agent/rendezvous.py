"""What the ranks of one generation meet at: a store of their own, and the environment that leads there."""

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
    """

    def __init__(self, generation: int, address: str = LOOPBACK) -> None:
        self.generation = generation
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


class Rendezvous:
    """The stores of a job, one per generation, and the environment of its ranks.

    Args:
        nnodes: how many nodes there are.
        nproc: how many ranks on each.
        address: of the node that this runs on, as the others reach it; a name is looked up once, here.

    Raises:
        OSError: it cannot be looked up.
    """

    def __init__(self, nnodes: int, nproc: int, address: str = LOOPBACK) -> None:
        self.nnodes = nnodes
        self.nproc = nproc
        self.address = str(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0])
        self.run_id = uuid.uuid4().hex
        self._store: GenerationStore | None = None

    def open(self, generation: int) -> None:
        """Have a store for ``generation``, a fresh one unless it is there already."""
        if self._store is None or self._store.generation != generation:
            self.close()
            self._store = GenerationStore(generation, self.address)

    def close(self) -> None:
        """Close the store that is open, if one is."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def go_env(self, generation: int) -> dict[str, str]:
        """What changes in a rank's environment when ``generation`` begins."""
        self.open(generation)
        assert self._store is not None
        return {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RESTART_COUNT": str(generation),
            "JOB_RESTART_COUNT": str(generation),
        }

    def rank_env(self, rank: int, node: int, generation: int) -> dict[str, str]:
        """All that a new rank needs to know to join ``generation``, as torchrun says it."""
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
            **self.go_env(generation),
        }
