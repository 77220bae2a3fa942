"""A process that forks on request, and the client that requests it. Runs in any Python and imports very little.

Run as a program, this file takes the role of `python` in a command that other code starts:
`python -IS fork_server.py ADDRESS -m carrel mcp` passes its arguments and streams to the fork server at the address,
within a hundredth of a second, and exits when the fork does."""

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


def request_fork(address, arguments, env, cwd, fds, session):  # no annotations: typing loads slowly
    """Ask for a fork. The fork server writes its pid and later its exit code to the first of the fds; the others are
    its standard streams and further descriptors."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.connect(f"\0{address}")
        socket.send_fds(connection, [json.dumps([arguments, dict(env), cwd, session]).encode()], fds)


def serve(requests):
    """Fork for each request until the standard input ends; return None then. In a fork: its arguments and the
    descriptors that came after the streams."""
    running: dict[int, tuple[int, int]] = {}
    ready = select.poll()
    ready.register(0)
    ready.register(requests, select.POLLIN)
    while True:
        for fd, _ in ready.poll():
            if fd == 0:
                return None
            if fd in running:
                pid, status = running.pop(fd)
                ready.unregister(fd)
                os.close(fd)
                write_number(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(status)
                continue
            request, (status, *fds), _, _ = socket.recv_fds(requests, LONGEST, 8)
            arguments, env, cwd, session = json.loads(request)
            pid = os.fork()
            if pid == 0:
                requests.close()
                for other in [status, *running, *(status for _, status in running.values())]:
                    os.close(other)
                become_program(fds[:3], env, cwd, session)
                return arguments, fds[3:]
            for received in fds:
                os.close(received)
            write_number(status, pid)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, status
            ready.register(pidfd, select.POLLIN)


def write_number(pipe, number):
    try:
        os.write(pipe, number.to_bytes(NUMBER, "big", signed=True))
    except BrokenPipeError:
        return  # The test did not wait for the exit code.


def become_program(streams, env, cwd, session):
    """Do what the kernel does for a new program: streams, session, environment, current folder."""
    if session:
        os.setsid()
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    if session and os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)


def main() -> int:
    status, theirs = os.pipe()
    request_fork(sys.argv[1], sys.argv[2:], os.environ, os.getcwd(), [theirs, 0, 1, 2], False)
    os.close(theirs)
    pid = int.from_bytes(os.read(status, NUMBER), "big")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    # Only the fork may hold the streams: a reader that waits for their end waits for the fork's exit.
    os.closerange(0, 3)
    return int.from_bytes(os.read(status, NUMBER), "big", signed=True)


if __name__ == "__main__":
    os._exit(main() & 255)
