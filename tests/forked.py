"""How a process that has loaded something is asked for forks of itself, and forks; in any Python, and with next to
nothing loaded for it.

As a program it stands where `python` would, for what somebody else starts: `python -IS forked.py ADDRESS -m carrel mcp`
hands its words and streams to the one at the address, in a hundredth of a second, and ends as the fork does."""

import fcntl
import json
import os
import select
import signal
import socket
import sys
import termios

NUMBER = 4
LONGEST = 1 << 20


def ask(address, words, env, cwd, fds, session):  # type: ignore[no-untyped-def] -- typing takes long to load
    """For a fork with these words. The first of the fds is told its pid, and how it ended; then come its streams."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.connect(f"\0{address}")
        socket.send_fds(line, [json.dumps([words, dict(env), cwd, session]).encode()], fds)


def serve(asked):  # type: ignore[no-untyped-def]
    """A fork for each who asks, until the standard input ends. In a fork: its words, and what fds came with them."""
    started = {}
    ready = select.poll()
    ready.register(0)
    ready.register(asked, select.POLLIN)
    while True:
        for fd, _ in ready.poll():
            if fd == 0:
                return None
            if fd in started:
                pid, told = started.pop(fd)
                ready.unregister(fd)
                os.close(fd)
                tell(told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(told)
                continue
            request, (told, *fds), _, _ = socket.recv_fds(asked, LONGEST, 8)
            words, env, cwd, session = json.loads(request)
            pid = os.fork()
            if pid == 0:
                asked.close()
                for other in [told, *started, *(told for _, told in started.values())]:
                    os.close(other)
                become(fds[:3], env, cwd, session)
                return words, fds[3:]
            for given in fds:
                os.close(given)
            tell(told, pid)
            watched = os.pidfd_open(pid)
            started[watched] = pid, told
            ready.register(watched, select.POLLIN)


def tell(pipe, number):  # type: ignore[no-untyped-def]
    try:
        os.write(pipe, number.to_bytes(NUMBER, "big", signed=True))
    except BrokenPipeError:
        return  # The test did not wait for its end.


def become(streams, env, cwd, session):  # type: ignore[no-untyped-def]
    """What the kernel does for a program that begins."""
    if session:
        os.setsid()
    for place, fd in enumerate(streams):
        os.dup2(fd, place)
        os.close(fd)
    if session and os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)


def main() -> int:
    status, told = os.pipe()
    ask(sys.argv[1], sys.argv[2:], os.environ, os.getcwd(), [told, 0, 1, 2], False)
    os.close(told)
    pid = int.from_bytes(os.read(status, NUMBER), "big")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    # The streams are the fork's alone: who waits for their end waits for its end.
    os.closerange(0, 3)
    return int.from_bytes(os.read(status, NUMBER), "big", signed=True)


if __name__ == "__main__":
    os._exit(main() & 255)
