"""Ports that nobody else is given while a test gets ready to listen there."""

from __future__ import annotations

import random
import socket

# Below those that the kernel gives to who asks for any (net.ipv4.ip_local_port_range): several jobs run at a time.
_FIRST, _LAST = 15_000, 29_000


def free_port() -> int:
    """A port of the loopback address on which nobody listens."""
    while True:
        port = random.SystemRandom().randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
