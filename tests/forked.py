"""Stands where `python` would, for a program that somebody else starts: `python -IS forked.py ADDRESS -m carrel mcp`.

It hands its words and streams to the loaded Python (warm.py) and ends as the fork does. It starts in a hundredth of a
second, so it loads next to nothing."""

import json
import os
import signal
import socket
import sys

NUMBER = 4
LONGEST = 1 << 20


def ask(address, words, env, cwd, fds, session):  # type: ignore[no-untyped-def] -- typing takes long to load
    """For a fork with these words and streams; the last of the fds is told its pid, and how it ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.connect(f"\0{address}")
        socket.send_fds(line, [json.dumps([words, dict(env), cwd, session]).encode()], fds)


def main() -> int:
    status, told = os.pipe()
    ask(sys.argv[1], sys.argv[2:], os.environ, os.getcwd(), [0, 1, 2, told], False)
    os.close(told)
    pid = int.from_bytes(os.read(status, NUMBER), "big")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    # The streams are the fork's alone: who waits for their end waits for its end.
    os.closerange(0, 3)
    return int.from_bytes(os.read(status, NUMBER), "big", signed=True)


if __name__ == "__main__":
    os._exit(main() & 255)
