"""Ports for servers that are told on which one to listen."""

import random
import socket
from pathlib import Path

_HELD_BACK = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port where nobody listens, and which the system gives to nobody: it is still free when a server comes to it."""
    first = int(_HELD_BACK.read_text().split()[0]) if _HELD_BACK.exists() else 32768
    while True:
        port = random.randrange(min(10_000, first - 1000), first)
        with socket.socket() as probe:
            # As servers do: what is left of closed connections is no hindrance.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
