"""Find ports that nobody else is given while a test gets ready to listen there."""

import random
import socket

# The kernel gives out those above by itself (net.ipv4.ip_local_port_range), and several jobs run at a time.
_FIRST, _LAST = 15_000, 29_000


def free_port() -> int:
    """Return a port of the loopback address on which nobody listens."""
    while True:
        port = random.SystemRandom().randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
