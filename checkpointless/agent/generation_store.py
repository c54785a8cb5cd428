"""The store that the ranks of one generation meet at.

It lives in the agent of a node and not with the coordinator: the ranks do not notice if that is lost.
"""

from __future__ import annotations

import socket

from torch.distributed import TCPStore

from checkpointless.wire.address import LOOPBACK


class GenerationStore:
    """A c10d store for one generation, which runs in the agent.

    It is bound to one address, on a free port. Closing it frees every rank that waits for a key in it.

    Args:
        generation: the generation that meets at the store.
        address: numeric address of this node, as the other nodes reach it.

    Raises:
        OSError, RuntimeError: the store cannot be opened.
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
