"""Addresses of nodes."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


def resolve(address: str) -> str:
    """Return the numeric form of an address; a name is looked up.

    Raises:
        OSError: the name cannot be looked up.
    """
    return str(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0])
