"""Ports for servers that must be given one at their start."""

import random
import socket
from pathlib import Path

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port that no server uses and that the kernel assigns to no client, so it is still free when a server starts."""
    first = int(_EPHEMERAL_RANGE.read_text().split()[0]) if _EPHEMERAL_RANGE.exists() else 32768
    while True:
        port = random.randrange(min(10_000, first - 1000), first)
        with socket.socket() as probe:
            # Servers set this too: closed connections that linger do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
