"""A plain socket in place of one with TLS, for whoever reads and writes without waiting."""

from __future__ import annotations

import select
import socket
import ssl
import threading

_CHUNK = 1 << 16


def plain(held: ssl.SSLSocket) -> socket.socket:
    """The other end of it is carried by a thread, as long as both are open. One thread: TLS bears no two at once."""
    ours, theirs = socket.socketpair()
    held.setblocking(False)
    threading.Thread(target=_carry, args=(held, theirs), name="carrel-engine", daemon=True).start()
    return ours


def _carry(held: ssl.SSLSocket, theirs: socket.socket) -> None:
    outgoing = b""
    try:
        while True:
            # What has been decrypted already is not seen by select.
            wait = 0 if held.pending() else None
            select.select([held] if outgoing else [held, theirs], [held] if outgoing else [], [], wait)
            if not _bring_in(held, theirs):
                return
            if not outgoing:
                read, _, _ = select.select([theirs], [], [], 0)
                outgoing = theirs.recv(_CHUNK) if read else b""
                if read and not outgoing:
                    return
            outgoing = _send(held, outgoing)
    except OSError:
        return  # either end is gone, which the other sees by the close
    finally:
        held.close()
        theirs.close()


def _bring_in(held: ssl.SSLSocket, theirs: socket.socket) -> bool:
    """What has come; False at the end."""
    try:
        data = held.recv(_CHUNK)
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return True
    theirs.sendall(data)
    return bool(data)


def _send(held: ssl.SSLSocket, data: bytes) -> bytes:
    """What could not be sent now."""
    try:
        return data[held.send(data) :] if data else b""
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return data
