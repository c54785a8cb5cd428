"""Find ports that nobody else is given while a test gets ready to listen there."""

import random
import socket


# The kernel gives out those above by itself (net.ipv4.ip_local_port_range), and several jobs run at a time.
def free_port(first: int = 15_000, last: int = 29_000) -> int:
    """Return a port of the loopback address on which nobody listens."""
    while True:
        port = random.SystemRandom().randint(first, last)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
